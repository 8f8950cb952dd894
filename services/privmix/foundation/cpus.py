"""Counts the CPUs that this process may use, which in a container are fewer than the machine has."""

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where Linux shows a container its own limits (cgroup v2)."""


def available_cpus(cgroup: Path = CGROUP) -> int:
    """Returns the number of CPUs by affinity and by the container's quota, rounded up; at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cpus
    return cpus if quota == "max" else max(1, min(cpus, math.ceil(int(quota) / int(period))))
