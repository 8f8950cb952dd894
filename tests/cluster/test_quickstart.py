"""The README's first command, twice: from nothing, and with everything kept; nothing is left running."""

import json
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.running import free_port

ROOT = Path(__file__).parents[2]
KEYS = {
    "completion",
    "completion_tokens",
    "epsilon_spent",
    "epsilon_total",
    "delta",
    "radius",
    "parts",
    "shards",
    "seconds",
}


def quickstart(directory: Path) -> dict[str, Any]:
    command = ["bash", "cluster/quickstart.sh", "--json", "--directory", str(directory), "--port", str(free_port())]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=1500)
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def ray_processes() -> set[int]:
    return {process.pid for process in psutil.process_iter(["cmdline"]) if "ray" in " ".join(process.cmdline()[:2])}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_quickstart_answers_and_goes_on_from_its_ledger(tmp_path: Path) -> None:
    before = ray_processes()
    first = quickstart(tmp_path / "run")
    assert set(first) == KEYS
    assert first["completion_tokens"] > 0
    assert 0 < first["epsilon_spent"] < first["epsilon_total"] == 8
    second = quickstart(tmp_path / "run")
    assert second["epsilon_spent"] > first["epsilon_spent"]
    print(first, second, sep="\n")
    assert ray_processes() <= before
