"""The Ray tasks of an evaluation: rows, one task for some models, and trials, one task for some methods of a run.

Tasks read and write files in the evaluation's directory; on a cluster of several machines all must see it.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from services.engine.engine import AdapterFiles
from services.evaluation.rows import PART_TYPE, PUBLIC_TYPE, EnsembleRows, Reader, read, writing
from services.evaluation.scoring import Precision, Scorer
from services.evaluation.text import Text
from services.evaluation.trial import Outcome, run_trials
from services.privacy.protocol import Protocol
from services.privacy.settings import Settings


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


@lru_cache(maxsize=1)
def _scorer(base: Path, precision: Precision) -> Scorer:
    """Kept from one task to the next of the same worker: most of a short task would go into loading the model."""
    return Scorer(base, precision)
