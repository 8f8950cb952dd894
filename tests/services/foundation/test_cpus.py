"""Claim: the number of CPUs follows the affinity of the process and the quota of its container."""

import os
from pathlib import Path

import pytest

from privmix.foundation.cpus import available_cpus


@pytest.mark.parametrize(
    ("content", "cpus"),
    [("max 100000", 6), ("250000 100000", 3), ("50000 100000", 1), ("900000 100000", 6), ("damaged", 6), (None, 6)],
)
def test_a_quota_limits_the_cpus(
    content: str | None, cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    if content is not None:
        (tmp_path / "cpu.max").write_text(content)
    assert available_cpus(tmp_path) == cpus
