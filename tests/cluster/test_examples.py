"""Claim: the examples run as they are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import RunningService, settled
from tests.support.clients import costs

EXAMPLES = Path(__file__).parents[2] / "cluster" / "examples"


def printed(name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_private_token_without_a_service() -> None:
    radius, token = printed("private_token.py").splitlines()
    assert radius.startswith("radius ")
    assert 0 <= int(token.removeprefix("token ")) < 1000


@pytest.mark.slow
def test_a_streamed_record(service: RunningService) -> None:
    *record, tokens = printed("stream_record.py", service.base_url).splitlines()
    assert set(json.loads("".join(record))) == {"reason", "urgent"}
    assert tokens.endswith(" of them free")


@pytest.mark.slow
def test_a_program_that_stops_at_its_budget(service: RunningService) -> None:
    before = settled(service)
    last = printed("stop_at_budget.py", service.base_url, "20").splitlines()[-1]
    used = int(last.split()[0])
    assert 12 < used <= 20
    costs(service, before, used)
