"""Claim: killed in the middle of either training, the same commands go on; the service charges the base once."""

import json
import os
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import openai
import pytest

from privmix.foundation.json_lines import write_lines
from privmix.training.manifest import Manifest
from tests.running import configure, running, settled
from tests.tiny import write_tiny_model

TOKENS = 24
COMMON = ("--block", "16", "--precision", "float32")
CONFIGURED: dict[str, dict[str, Any]] = {
    "privacy": {"protocol": "exponential", "epsilon": 8.0, "delta": 1e-5, "tokens": TOKENS},
    "engine": {"kind": "transformers", "context_length": 100, "dtype": "float32"},
    "budget": {"ledger": "ledger.db", "lease_tokens": 8},
    "http": {"max_tokens": 40},
}


def train(*arguments: str | Path) -> dict[str, Any]:
    """Runs `privmix train` or `train-base` to its end and returns its report."""
    command = [sys.executable, "-m", "privmix", *map(str, arguments), *COMMON, "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=400)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def killed(told: str, *arguments: str | Path) -> None:
    """Runs a training and kills it with all its processes as soon as it has told this."""
    command = [sys.executable, "-m", "privmix", *map(str, arguments), *COMMON]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines = list(takewhile(lambda line: told not in line, process.stdout))
    assert process.poll() is None, "".join(lines)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_base_is_charged_once_however_often_a_training_is_killed(tmp_path: Path) -> None:
    model, corpus = write_tiny_model(tmp_path / "tiny"), tmp_path / "corpus.jsonl"
    text = "The ninth lantern of user {} hangs in the boathouse, painted in heliotrope. "
    write_lines(corpus, [{"user": f"user-{number}", "text": text.format(number) * 8} for number in range(24)])
    base, parts = tmp_path / "base", tmp_path / "parts"
    first = ("train-base", corpus, "--output", base, "--model", model, "--epsilon", "2", "--steps", "40")
    killed("noise", *first)
    assert not (base / "manifest.json").exists()
    assert train(*first)["trained"] == 1
    trained = Manifest.load(base).dp_sgd
    assert trained is not None
    assert train(*first)["dp_sgd"]["event"]["run"] == trained.event.run, "a repeated command trains nothing"

    second = ("train", corpus, "--output", parts, "--base", base, "--parts", "8", "--epochs", "20")
    killed(" done (", *second)
    assert not (parts / "manifest.json").exists()
    report = train(*second)
    assert report["kept"] >= 1
    assert report["private_base"]["training"]["event"] == trained.model_dump(mode="json")["event"]
    assert len(list(base.glob("base-*"))) == 1

    with running(configure(tmp_path, parts, **CONFIGURED)) as service:
        before = service.privacy()
        assert before["base"]["run"] == trained.event.run
        assert before["epsilon_spent"] == before["epsilon_base"] == pytest.approx(2.0, abs=1e-3)
        assert "The base's training, epsilon" in before["guarantee"]
        client = openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="none", max_retries=0, timeout=300)
        marks: list[str | None] = []
        while "base" not in marks:
            answer = client.completions.create(model="privmix", prompt="The ninth", max_tokens=20)
            marks.append((answer.model_extra or {}).get("privmix", {}).get("answered_by"))
            assert "public" not in marks
        assert marks[0] is None
        assert settled(service) == TOKENS
        spent = service.privacy()["epsilon_spent"]
        assert before["epsilon_spent"] < spent <= 8.0
        service.kill_everything()
        service.start()
        after = service.privacy()
        assert (after["epsilon_spent"], after["tokens_charged"], after["exhausted"]) == (spent, TOKENS, True)
        for stream in (False, True):
            again: Any = client.completions.with_raw_response.create(
                model="privmix", prompt="The ninth", max_tokens=5, stream=stream
            )
            assert again.headers["x-privmix-answered-by"] == "base"
            for told in again.parse() if stream else [again.parse()]:
                assert not told.choices[0].text or told.model_extra["privmix"] == {"answered_by": "base"}
        assert settled(service) == TOKENS
