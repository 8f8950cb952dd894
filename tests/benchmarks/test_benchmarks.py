"""Claim: each benchmark runs, in its smallest form, and prints the figures that the pages cite."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def figures(name: str, *options: str) -> dict[str, Any]:
    """Returns what `python -m tests.benchmarks.NAME --json` prints."""
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", *options, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout))


def test_the_mathematics_of_a_token() -> None:
    measured = figures("mollify", "--rows", "8", "--repeats", "1")["protocols"]
    assert {"pmixed ratio clip", "exponential", "individual", "submix", "gnmax"} <= set(measured)
    for by_rows in measured.values():
        assert by_rows["8"]["ms_per_row"] > 0
        assert by_rows["8"]["passes"] > 1


def test_the_ledger() -> None:
    measured = figures("ledger", "--rows", "2000", "--seconds", "0.5")
    for database in ("sqlite", "postgresql"):
        assert measured[database]["accounts_tokens_per_s"]
        assert measured[database]["rows_per_s_verified"] > 0


def test_the_keys() -> None:
    measured = figures("keys", "--keys", "10", "--requests", "50", "--clients", "8")
    for database in ("sqlite", "postgresql"):
        assert measured[database]["exact"]
        assert measured[database]["requests_per_s"] > 0


def test_an_evaluation() -> None:
    measured = figures("evaluate", "--parts", "2", "--blocks", "1", "--sample", "1")
    assert measured["token_parts_per_s"] > 0
    assert measured["ratio"] > 0


def test_the_training_of_heads() -> None:
    assert figures("heads", "--epochs", "1", "--repeats", "1", "--samples", "2")["ratio"] > 0


def test_the_reduction_of_rows() -> None:
    measured = figures("reduction", "--vocabulary", "2000", "--sequences", "2", "--rows", "2", "--repeats", "1")
    assert (
        measured["bytes_a_token"]["individual,80,1"]["reduced"] * 20
        < measured["bytes_a_token"]["individual,80,1"]["raw"]
    )
    assert all(times["reduced"] > 0 for times in measured["ms"].values())
