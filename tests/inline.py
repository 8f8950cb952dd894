"""Runs trainings and evaluations in this process, without Ray, for tests of what they compute."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from privmix.foundation import ray_session
from privmix.laboratory.evaluation import evaluate, workbench
from privmix.training import public_model, tasks
from privmix.training.base import Base


def run_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the cluster: each Ray task is a call, in the order of the jobs."""
    monkeypatch.setattr(ray_session, "connected", nullcontext)
    monkeypatch.setattr(tasks, "train_adapters", _train_adapters)
    here = SimpleNamespace(put=lambda value: value, cluster_resources=lambda: {"CPU": 1})
    monkeypatch.setattr(evaluate, "connected", nullcontext)
    monkeypatch.setattr(workbench, "run_as_ray_tasks", _run_jobs)
    monkeypatch.setattr(workbench, "ray", here)


def _train_adapters(base: Base, work: Mapping[str, tasks.Work], *_: object) -> Iterator[tuple[str, dict[str, bytes]]]:
    for name, train in work.items():
        yield name, train(public_model.resolve(base.name), base.name, report=lambda done: None)


def _run_jobs(
    function: Callable[..., Any], jobs: Mapping[str, Sequence[Any]], *_: object, **__: object
) -> Iterator[tuple[str, Any]]:
    for name, arguments in jobs.items():
        yield name, function(*arguments)
