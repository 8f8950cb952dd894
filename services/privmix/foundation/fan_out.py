"""Runs independent jobs as Ray tasks."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from privmix.foundation.errors import InputError, WorkError
from privmix.foundation.progress import Display

_LOOK_S = 0.5
"""How often the progress of running jobs is shown."""


def run_as_ray_tasks(
    function: Callable[..., Any],
    jobs: Mapping[str, Sequence[Any]],
    display: Display,
    *,
    cpus: float = 1,
    gpus: float = 0,
    reports: bool = False,
) -> Iterator[tuple[str, Any]]:
    """Runs `function` on the arguments of each job, on the connected cluster. Yields the results as the jobs finish.

    A process runs many jobs, one after another, and keeps what the function has loaded.

    Args:
        jobs: the arguments of each job, by the job's name.
        cpus, gpus: what each job reserves, in Ray's units.
        reports: give the function `report`, which it calls with the fraction done.

    Raises:
        InputError: a job refused its input. The others are cancelled.
        WorkError: a job failed. The others are cancelled.
    """
    board = ray.remote(_Board).options(num_cpus=0).remote() if reports else None
    # Ray would end the process of a job with a GPU after it (`max_calls`).
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=2, max_calls=0)(_run)
    running = {task.remote(function, max(1, int(cpus)), board, name, *given): name for name, given in jobs.items()}
    fractions = dict.fromkeys(jobs, 0.0)
    try:
        while running:
            ready, _ = ray.wait(list(running), timeout=_LOOK_S if reports else None)
            for reference in ready:
                name = running.pop(reference)
                yield name, result_of(reference, name)
                fractions[name] = 1.0
            if board is not None:
                fractions |= ray.get(board.fractions.remote())
            display.show(fractions)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        if board is not None:
            ray.kill(board)


class _Board:
    """Collects the progress of each job: only fractions, because a loss would reveal private data."""

    def __init__(self) -> None:
        self._fractions: dict[str, float] = {}

    def report(self, name: str, fraction: float) -> None:
        self._fractions[name] = fraction

    def fractions(self) -> dict[str, float]:
        return self._fractions


def result_of(reference: Any, name: str) -> Any:
    """Returns the result of a Ray task with the name of its job in error messages.

    Raises:
        InputError: the task refused its input.
        WorkError: the task failed.
    """
    try:
        return ray.get(reference)
    except OutOfMemoryError as error:
        raise WorkError(f"{name}: the machine ran out of memory; run fewer tasks at a time (train: --cpus)") from error
    except RayTaskError as error:
        raise named(error.cause, name) from error
    except RayError as error:
        raise WorkError(f"{name}: its worker was lost ({type(error).__name__}); run again to continue") from error


def named(error: BaseException, name: str) -> InputError | WorkError:
    """Returns the error of a job with the job's name.

    An unexpected error appears only by its type, because its text can contain private values.
    """
    if isinstance(error, InputError):
        return InputError(f"{name}: {error}")
    problem = error if isinstance(error, WorkError) else f"failed ({type(error).__name__})"
    return WorkError(f"{name}: {problem}")


def _run(function: Callable[..., Any], threads: int, board: Any, name: str, *arguments: Any) -> Any:
    """Runs a job with as many threads as Ray reserves cores for it, and without GPUs if it reserves none."""
    if not ray.get_gpu_ids():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves all GPUs visible to a task that reserves none
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    return function(*arguments) if board is None else function(*arguments, report=partial(_report, board, name))


def _report(board: Any, name: str, fraction: float) -> None:
    board.report.remote(name, fraction)
