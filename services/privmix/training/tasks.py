"""Trains adapters in Ray tasks. A task trains several adapters one after another, each only from its own tokens.

A worker process loads the public model once and keeps it for its next task. A task returns each adapter as soon as it
is trained, so that an interrupted training loses only the adapters in progress.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ray

from privmix.foundation.errors import InputError
from privmix.foundation.fan_out import result_of
from privmix.foundation.progress import Display
from privmix.training import public_model
from privmix.training.adapter import Files
from privmix.training.base import Base
from privmix.training.options import Resources

_SECONDS_BETWEEN_LOOKS = 0.5
# The number of tasks for each worker: enough that workers finish together, and that a lost worker repeats little work.
_TASKS = 4


class Work(Protocol):
    """Trains one adapter on the public model in `base`. `base_name` is the model's name in the configuration."""

    def __call__(self, base: Path, base_name: str, *, report: Callable[[float], None]) -> Files: ...


@dataclass(frozen=True, eq=False)
class TrainingTask:
    """Describes one adapter to train. `work` contains its tokens."""

    name: str
    base: Base
    work: Work


def train_adapters(
    jobs: Sequence[TrainingTask], resources: Resources, display: Display
) -> Iterator[tuple[TrainingTask, Files]]:
    """Trains all `jobs` on the connected cluster and yields each job with its adapter's files when it finishes.

    Raises:
        InputError: the cluster is too small for one adapter, or the options do not fit the model.
        WorkError: an adapter failed. The others are cancelled.
    """
    cpus, gpus = resources.cpus, _gpus(resources)
    _check_room(cpus, gpus)
    board = ray.remote(_Board).options(num_cpus=0).remote()
    task = ray.remote(_train).options(num_cpus=cpus, num_gpus=gpus, max_retries=2, num_returns="streaming")
    threads = max(1, int(cpus))
    groups = _groups(jobs, _TASKS * _workers(cpus, gpus))
    running = {task.remote(group, threads, board): deque(group) for group in groups}
    fractions = dict.fromkeys((job.name for job in jobs), 0.0)
    try:
        while running:
            ready, _ = ray.wait(list(running), timeout=_SECONDS_BETWEEN_LOOKS)
            for results in ready:
                job = running[results].popleft()
                yield job, result_of(next(results), job.name)
                fractions[job.name] = 1.0
                if not running[results]:
                    del running[results]
            fractions |= ray.get(board.fractions.remote())
            display.show(fractions)
    finally:
        for results in running:
            ray.cancel(results, force=True)
        ray.kill(board)


class _Board:
    """Collects the progress of each adapter: only fractions, because a loss would reveal private data."""

    def __init__(self) -> None:
        self._fractions: dict[str, float] = {}

    def report(self, name: str, fraction: float) -> None:
        self._fractions[name] = fraction

    def fractions(self) -> dict[str, float]:
        return self._fractions


def _groups(jobs: Sequence[TrainingTask], count: int) -> list[Sequence[TrainingTask]]:
    """Divides the jobs into at most `count` groups of about equal size."""
    return [group for first in range(count) if (group := jobs[first::count])]


def _workers(cpus: float, gpus: float) -> int:
    """Returns how many tasks the cluster can run at once."""
    total = ray.cluster_resources()
    return max(1, int(min(total.get(name, 0) / needed for name, needed in (("CPU", cpus), ("GPU", gpus)) if needed)))


def _train(jobs: Sequence[TrainingTask], threads: int, board: Any) -> Iterator[Files]:
    import torch

    torch.set_num_threads(threads)
    for job in jobs:
        path = public_model.resolve(job.base.name)
        if public_model.revision(path) != job.base.revision:
            raise InputError(f"the public model {job.base.name} differs on {ray.util.get_node_ip_address()}")
        yield job.work(path, job.base.name, report=partial(_report, board, job.name))


def _report(board: Any, name: str, fraction: float) -> None:
    board.report.remote(name, fraction)


def _gpus(resources: Resources) -> float:
    if resources.gpus is not None:
        return resources.gpus
    return 1.0 if ray.cluster_resources().get("GPU", 0) >= 1 else 0.0


def _check_room(cpus: float, gpus: float) -> None:
    for name, needed in (("CPU", cpus), ("GPU", gpus)):
        total = ray.cluster_resources().get(name, 0)
        if needed > total:
            raise InputError(
                f"{name.lower()}s: an adapter needs {needed:g}, but the cluster has {total:g}; choose a smaller number"
            )
