"""Claim: `privmix generate` creates a data set with a card, and reports errors before it spends tokens."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from privmix.training.manifest import Manifest
from privmix_cluster.cli import app
from tests.running import RunningService, configure, own_ensemble, settled
from tests.services.generation.small_service import SmallService, serving

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", "OPENAI_API_KEY": ""})
LABELS = ["--label", "urgent=3", "--label", "routine=2"]


def test_a_data_set_with_its_card_from_labels(tmp_path: Path) -> None:
    with serving(SmallService()) as service:
        words = ["generate", "--url", service.url, "--output", str(tmp_path / "job"), *LABELS, "--max-tokens", "5"]
        done = runner.invoke(app, [*words, "--json"])
        assert done.exit_code == 0, done.output
        summary = json.loads(done.stdout)
        assert summary["complete"] is True
        assert summary["card"]["budget"]["tokens_delivered"] == service.charged == 25
        again = runner.invoke(app, words)
        assert "5 of 5 texts" in again.stdout
        assert "Small promise." in again.stdout
        assert service.charged == 25
    lines = [json.loads(line) for line in (tmp_path / "job/synthetic.jsonl").read_text().splitlines()]
    assert sorted(line["label"] for line in lines) == ["routine"] * 2 + ["urgent"] * 3
    assert {asked["prompt"] for asked in service.requests} == {"Label: urgent\nText:", "Label: routine\nText:"}


def test_prompts_come_from_a_file_and_options_reach_the_service(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"day": "Monday", "count": 2}\n{"day": "Friday"}\n')
    asked = ["--prompts", str(prompts), "--template", r"On {day}\n", "--temperature", "0.7", "--stop", r"\n\n"]
    with serving(SmallService()) as service:
        done = runner.invoke(app, ["generate", "--url", service.url, "--output", str(tmp_path / "job"), *asked])
        assert done.exit_code == 0, done.output
    assert sorted(item["prompt"] for item in service.requests) == ["On Friday\n", "On Monday\n", "On Monday\n"]
    assert (service.requests[0]["temperature"], service.requests[0]["stop"]) == (0.7, ["\n\n"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--output", "job", *LABELS], "--url: give either --url"),
        (["--url", "http://127.0.0.1:9", *LABELS], "--output: is missing; add the directory"),
        (["--url", "http://127.0.0.1:9", "--output", "job"], "--prompts: give either"),
        (["--url", "http://127.0.0.1:9", "--output", "job", *LABELS], "url: no service answers"),
        (["--url", "http://127.0.0.1:9", "--output", "job", *LABELS, "--temperature", "0"], "--temperature"),
        (["--url", "http://127.0.0.1:9", "--output", "job", *LABELS, "--max-tokens", "0"], "--max-tokens"),
        (["--url", "http://127.0.0.1:9", "--output", "job", *LABELS, "--template", "{topic}"], "no field 'topic'"),
        (["--url", "http://127.0.0.1:9", "--output", "job", *LABELS, "--schema", "absent"], "schema absent: cannot"),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = runner.invoke(app, ["generate", *words])
    assert refused.exit_code == 2
    assert problem in refused.output.replace("Invalid value for ", "")
    assert "Traceback" not in refused.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_service_is_paid_once_though_the_job_is_killed(service: RunningService, tmp_path: Path) -> None:
    """The journal before the kill and the ledger differ at most by the tokens in flight."""
    tokens, count, concurrency = 24, 10, 2
    job = tmp_path / "job"
    words = ["generate", "--url", service.base_url, "--output", str(job), "--label", f"urgent={count}"]
    words += ["--max-tokens", str(tokens), "--concurrency", str(concurrency), "--json"]
    before = settled(service)
    process = subprocess.Popen([sys.executable, "-m", "privmix", *words])
    journal, deadline = job / "journal.jsonl", time.monotonic() + 300
    while not journal.exists() or journal.read_text().count("finish_reason") < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = [text["item"] for text in map(json.loads, journal.read_text().splitlines()[:-1]) if "finish_reason" in text]
    asked = journal.read_text().count('"asked"')
    charged = settled(service) - before
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    card = json.loads(done.stdout)["card"]
    assert card["texts"]["whole"] == count
    assert card["guarantee"] == service.privacy()["guarantee"]
    delivered, paid = card["budget"]["tokens_delivered"], settled(service) - before
    assert delivered <= paid <= delivered + concurrency * tokens
    assert charged < paid
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    later = [record["item"] for record in lines if "asked" in record][asked:]
    assert kept and not {*kept} & {*later}, "a complete text is not requested again"
    made = [json.loads(line)["id"] for line in (job / "synthetic.jsonl").read_text().splitlines()]
    assert sorted(made) == list(range(count))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_command_starts_the_service_makes_the_texts_and_ends_it(ensemble: Path, tmp_path: Path) -> None:
    config, job = configure(tmp_path, own_ensemble(ensemble, tmp_path)), tmp_path / "job"
    words = ["generate", "--config", str(config), "--output", str(job), *LABELS, "--max-tokens", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "privmix", *words, "--json"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    card = json.loads(done.stdout)["card"]
    assert card["texts"]["whole"] == 5
    assert card["budget"]["tokens_delivered"] == card["budget"]["tokens_charged_by_service"] > 0
    assert "differential privacy" in card["guarantee"]
    assert card["base_model"] == Path(Manifest.load(tmp_path / "ensemble").base_model).name
