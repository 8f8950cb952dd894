"""Runs independent jobs as Ray tasks, on one processor core each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from privmix.foundation.errors import InputError, WorkError
from privmix.foundation.progress import Display


def run_as_ray_tasks(
    function: Callable[..., Any], jobs: Mapping[str, Sequence[Any]], display: Display, *, gpus: bool = False
) -> Iterator[tuple[str, Any]]:
    """Runs `function` on the arguments of each job, on the connected cluster. Yields the results as the jobs finish.

    Args:
        jobs: the arguments of each job, by the job's name.
        gpus: reserve a GPU for each job if the cluster has any.

    Raises:
        InputError: a job refused its input. The others are cancelled.
        WorkError: a job failed. The others are cancelled.
    """
    device = 1 if gpus and ray.cluster_resources().get("GPU", 0) >= 1 else 0
    task = ray.remote(_run_on_one_core).options(num_cpus=1, num_gpus=device, max_retries=2)
    running = {task.remote(function, *arguments): name for name, arguments in jobs.items()}
    fractions = dict.fromkeys(jobs, 0.0)
    try:
        while running:
            (reference,), _ = ray.wait(list(running), num_returns=1)
            name = running.pop(reference)
            yield name, result_of(reference, name)
            fractions[name] = 1.0
            display.show(fractions)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


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


def _run_on_one_core(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a job with one thread, because Ray reserves one core for it."""
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    return function(*arguments)
