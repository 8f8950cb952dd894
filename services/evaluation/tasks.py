"""The work of an evaluation as Ray tasks: rows, one task for some models, and trials, one for some methods of a run.

Tasks read and write files in the evaluation's directory; on a cluster of several machines all must see it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError

from services.engine.engine import AdapterFiles
from services.evaluation.rows import PART_TYPE, PUBLIC_TYPE, EnsembleRows, Reader, read, writing
from services.evaluation.scoring import Precision, Scorer
from services.evaluation.text import Text
from services.evaluation.trial import Outcome, run_trials
from services.privacy.protocol import Protocol
from services.privacy.settings import Settings
from services.training.errors import TrainingError
from services.training.progress import Display


class EvaluationError(TrainingError):
    """The evaluation could not be finished; run again, it goes on where it was."""


def spread(
    function: Callable[..., Any], jobs: Mapping[str, Sequence[Any]], display: Display, *, gpus: bool = False
) -> Iterator[tuple[str, Any]]:
    """Run `function` on the arguments of each job, on one core each, on the connected cluster; yields as they finish.

    Args:
        gpus: give each a GPU, where there are any.

    Raises:
        EvaluationError: a job failed; the others are cancelled.
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


def score_public(base: Path, text: Text, precision: Precision, target: Path) -> None:
    """Write the rows of the public model."""
    scorer = _scorer(base, precision)
    with writing(target, (text.positions, scorer.vocabulary), PUBLIC_TYPE) as put:
        for _, index, first, rows in scorer.log_probabilities(text.blocks):
            put(text.offsets[index] + first, rows)


def score(
    base: Path, adapters: Sequence[tuple[AdapterFiles, Path]], text: Text, precision: Precision, public: Path
) -> None:
    """Write the rows of some adapters, each to its file, as differences from the rows in `public`."""
    scorer, base_rows = _scorer(base, precision), read(public)
    shape = (text.positions, scorer.vocabulary)
    with ExitStack() as files:
        put = [files.enter_context(writing(target, shape, PART_TYPE)) for _, target in adapters]
        for which, index, first, rows in scorer.log_probabilities(text.blocks, [one for one, _ in adapters]):
            place = text.offsets[index] + first
            put[which](place, rows.cpu() - torch.from_numpy(np.array(base_rows[place : place + len(rows)])))


def trials(
    planned: Sequence[tuple[Settings, Protocol]],
    files: EnsembleRows,
    positions: NDArray[np.int64],
    tokens: NDArray[np.int64],
) -> list[Outcome]:
    """`run_trials` on rows from files."""
    return run_trials(planned, Reader(files), positions, tokens)


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """With one thread, as Ray counts it."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    return function(*arguments)


@lru_cache(maxsize=1)
def _scorer(base: Path, precision: Precision) -> Scorer:
    """Kept from one task to the next of the same worker: most of a short task would go into loading the model."""
    return Scorer(base, precision)


def _result(reference: Any, name: str) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        # The message may hold values of a distribution; the type does not.
        raise EvaluationError(f"{name}: failed ({type(error.cause).__name__})") from error
    except RayError as error:
        raise EvaluationError(f"{name}: its worker was lost ({type(error).__name__}); run again to go on") from error
