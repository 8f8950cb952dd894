"""Trains adapters in Ray tasks, each only from its own tokens.

A worker process loads the public model once and keeps it for its next task. Each adapter is stored as soon as it is
trained, so that an interrupted training loses only the adapters in progress.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import ray

from privmix.foundation.errors import InputError
from privmix.foundation.fan_out import run_as_ray_tasks
from privmix.foundation.progress import Display
from privmix.training import public_model
from privmix.training.adapter import Files
from privmix.training.base import Base
from privmix.training.options import Resources


class Work(Protocol):
    """Trains one adapter on the public model in `base`. `base_name` is the model's name in the configuration."""

    def __call__(self, base: Path, base_name: str, *, report: Callable[[float], None]) -> Files: ...


def train_adapters(
    base: Base, work: Mapping[str, Work], resources: Resources, display: Display
) -> Iterator[tuple[str, Files]]:
    """Trains adapters on the connected cluster and yields the name and the files of each when it finishes.

    Args:
        work: trains each adapter, by its name.

    Raises:
        InputError: the cluster is too small for one adapter, or the options do not fit the model.
        WorkError: an adapter failed. The others are cancelled.
    """
    cpus, gpus = resources.cpus, _gpus(resources)
    _check_room(cpus, gpus)
    jobs = {name: (base, train) for name, train in work.items()}
    yield from run_as_ray_tasks(_train, jobs, display, cpus=cpus, gpus=gpus, reports=True)


def _train(base: Base, train: Work, *, report: Callable[[float], None]) -> Files:
    path = public_model.resolve(base.name)
    if public_model.revision(path) != base.revision:
        raise InputError(f"the public model {base.name} differs on {ray.util.get_node_ip_address()}")
    return train(path, base.name, report=report)


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
