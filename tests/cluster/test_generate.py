"""Claim: `privmix generate` creates a data set with a card, and reports errors before it spends tokens."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.running import RunningService, settled
from tests.services.generation.small_service import SmallService, serving
from tests.support.cli import privmix, refused, reported

TEMPLATE = ["--template", r"Label: {label}\nText:"]


def prompts(folder: Path, **counts: int) -> list[str]:
    """Writes the prompts of labels, and returns the options for them."""
    rows = [{"label": label, "count": count} for label, count in counts.items()]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--prompts", str(folder / "prompts.jsonl"), *TEMPLATE]


def test_a_data_set_with_its_card(tmp_path: Path) -> None:
    asked = prompts(tmp_path, urgent=3, routine=2)
    with serving(SmallService()) as service:
        words = ["generate", "--url", service.url, "--output", str(tmp_path / "job"), *asked, "--max-tokens", "5"]
        summary = reported(*words)
        assert summary["complete"] is True
        assert summary["card"]["budget"]["tokens_delivered"] == service.charged == 25
        again = privmix(*words)
        assert "5 of 5 texts" in again.stdout
        assert "Small promise." in again.stdout
        assert service.charged == 25
    lines = [json.loads(line) for line in (tmp_path / "job/synthetic.jsonl").read_text().splitlines()]
    assert sorted(line["label"] for line in lines) == ["routine"] * 2 + ["urgent"] * 3
    assert {asked["prompt"] for asked in service.requests} == {"Label: urgent\nText:", "Label: routine\nText:"}


def test_options_reach_the_service(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"day": "Monday", "count": 2}\n{"day": "Friday"}\n')
    asked = ["--prompts", str(file), "--template", r"On {day}\n", "--temperature", "0.7", "--stop", r"\n\n"]
    with serving(SmallService()) as service:
        done = privmix("generate", "--url", service.url, "--output", tmp_path / "job", *asked)
        assert done.exit_code == 0, done.output
    assert sorted(item["prompt"] for item in service.requests) == ["On Friday\n", "On Monday\n", "On Monday\n"]
    assert (service.requests[0]["temperature"], service.requests[0]["stop"]) == (0.7, ["\n\n"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "url: no service answers"),
        (["--temperature", "0"], "--temperature"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--template", "{topic}"], "no field 'topic'"),
        (["--schema", "absent"], "schema absent: cannot"),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--url", "http://127.0.0.1:9", "--output", "job", *prompts(tmp_path, urgent=3), *words]
    told = refused("generate", *given)
    assert problem in told.replace("Invalid value for ", "")
    assert "Traceback" not in told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_service_is_paid_once_though_the_job_is_killed(service: RunningService, tmp_path: Path) -> None:
    """The journal before the kill and the ledger differ at most by the tokens in flight."""
    tokens, count, concurrency = 24, 10, 2
    job = tmp_path / "job"
    words = ["generate", "--url", service.base_url, "--output", str(job), *prompts(tmp_path, urgent=count)]
    words += ["--max-tokens", str(tokens), "--concurrency", str(concurrency)]
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
    card = reported(*words)["card"]
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
