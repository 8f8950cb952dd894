"""Claim: the README's first command runs from an empty directory and again, and leaves no processes."""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from tests.running import free_port

ROOT = Path(__file__).parents[2]
MARK = "TEST_QUICKSTART"


def quickstart(directory: Path, mark: str) -> dict[str, Any]:
    """Runs the command and returns its result. Every process that it starts has `mark` in its environment."""
    command = ["bash", "cluster/quickstart.sh", "--json", "--directory", str(directory), "--port", str(free_port())]
    environment = {**os.environ, MARK: mark}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, timeout=1500)
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def marked_processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_quickstart_answers_and_goes_on_from_its_ledger(tmp_path: Path) -> None:
    mark = uuid4().hex
    first = quickstart(tmp_path / "run", mark)
    assert first["completion_tokens"] > 0
    assert 0 < first["epsilon_spent"] < first["epsilon"] == 8
    second = quickstart(tmp_path / "run", mark)
    assert second["epsilon_spent"] > first["epsilon_spent"]
    print(first, second, sep="\n")
    _, alive = psutil.wait_procs(marked_processes(mark), timeout=30)
    assert not alive
