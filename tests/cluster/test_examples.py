"""Claim: the examples run as they are."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import RunningService

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
def test_a_question(service: RunningService) -> None:
    *_, charged, epsilon = printed("ask.py", service.base_url).splitlines()
    assert "tokens charged" in charged
    assert "of 8.0 at delta 1e-05" in epsilon


@pytest.mark.slow
def test_a_streamed_chat(service: RunningService) -> None:
    assert printed("stream_chat.py", service.base_url).rstrip().endswith("tokens charged")


def test_every_example_is_tested() -> None:
    tests = Path(__file__).read_text()
    assert all(f'"{example.name}"' in tests for example in EXAMPLES.glob("*.py"))
