"""Independent jobs as Ray tasks, on one processor core each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from services.errors import WorkError
from services.progress import Display


def spread(
    function: Callable[..., Any], jobs: Mapping[str, Sequence[Any]], display: Display, *, gpus: bool = False
) -> Iterator[tuple[str, Any]]:
    """Run `function` on the arguments of each job, on the connected cluster. Yields the results as the jobs finish.

    Args:
        gpus: give each a GPU, where there are any.

    Raises:
        WorkError: a job failed; the others are cancelled.
    """
    device = 1 if gpus and ray.cluster_resources().get("GPU", 0) >= 1 else 0
    task = ray.remote(_alone).options(num_cpus=1, num_gpus=device, max_retries=2)
    running = {task.remote(function, *arguments): name for name, arguments in jobs.items()}
    fractions = dict.fromkeys(jobs, 0.0)
    try:
        while running:
            (reference,), _ = ray.wait(list(running), num_returns=1)
            name = running.pop(reference)
            yield name, _result(reference, name)
            fractions[name] = 1.0
            display.show(fractions)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run the job with one thread, because Ray reserves one core for it."""
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    return function(*arguments)


def _result(reference: Any, name: str) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        # The message may hold values of a distribution; the type does not.
        raise WorkError(f"{name}: failed ({type(error.cause).__name__})") from error
    except RayError as error:
        raise WorkError(f"{name}: its worker was lost ({type(error).__name__}); run again to go on") from error
