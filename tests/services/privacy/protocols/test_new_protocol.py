"""Claim: one file and one line add a protocol that can be planned, configured, evaluated, audited and served."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
TOY = Path(__file__).parent / "toy.py"
LINE = '    "toy": "toy:ToySettings",\n'


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the toy protocol's file and registration."""
    copy = tmp_path_factory.mktemp("extended")
    for folder in ("cluster", "services", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    shutil.copy(TOY, copy / "services" / "privmix" / "privacy" / "protocols")
    registry = copy / "services" / "privmix" / "privacy" / "protocols" / "__init__.py"
    head, brace, tail = registry.read_text().partition("}\n")
    registry.write_text(head + LINE + brace + tail)
    return copy


def passed(copy: Path, markers: str, *suites: str) -> int:
    """Runs the toy protocol's cases of the suites and returns their number."""
    command = [sys.executable, "-m", "pytest", "-q", "-k", "toy", "-m", markers, "-p", "no:cacheprovider", *suites]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (copy / "services", copy / "cluster", copy)))}
    result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return int(result.stdout.splitlines()[-1].split(" passed")[0].split()[-1])


@pytest.mark.slow
def test_the_toy_is_planned_configured_evaluated_and_audited(extended: Path) -> None:
    suites = (
        "tests/services/privacy/protocols/test_registry.py",
        "tests/services/laboratory/evaluation/test_every_protocol.py",
        "tests/services/laboratory/audit/attacks/test_likelihood.py",
        "tests/services/laboratory/audit/attacks/test_mutants.py",
        "tests/cluster/test_protocols.py",
    )
    assert passed(extended, "not slow", *suites) >= 15


@pytest.mark.slow
def test_the_toy_is_served_and_charged(extended: Path) -> None:
    assert passed(extended, "slow", "tests/services/coordinator/test_protocols.py") == 1
