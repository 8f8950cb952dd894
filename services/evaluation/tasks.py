"""Implements the Ray tasks of an evaluation: they compute rows for some models, or trials of some protocols in a run.

Tasks read and write files in the evaluation's directory, so all machines of the cluster must share it.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.engine.engine import AdapterFiles
from services.evaluation.rows import EnsembleRows, Reader, writing
from services.evaluation.scoring import Precision, Scorer
from services.evaluation.text import Text
from services.evaluation.trial import Outcome, run_trials
from services.privacy.protocol import Protocol
from services.privacy.settings import Settings


def score_public(base: Path, text: Text, precision: Precision, head: Path, public: Path) -> None:
    """Writes the public model's output layer and its hidden states."""
    scorer = _scorer(base, precision)
    scorer.head.save(head)
    _score(scorer, [], text, [public])


def score(base: Path, adapters: Sequence[tuple[AdapterFiles, Path]], text: Text, precision: Precision) -> None:
    """Writes the hidden states of some adapters, each to its file."""
    _score(_scorer(base, precision), [files for files, _ in adapters], text, [path for _, path in adapters])


def _score(scorer: Scorer, adapters: Sequence[AdapterFiles], text: Text, targets: Sequence[Path]) -> None:
    shape = (text.positions, scorer.head.size)
    with ExitStack() as files:
        writers = [files.enter_context(writing(target, shape)) for target in targets]
        for model, index, hidden in scorer.hidden_states(text.blocks, adapters):
            writers[model](text.offsets[index], hidden)


def trials(
    planned: Sequence[tuple[Settings, Protocol]],
    files: EnsembleRows,
    positions: NDArray[np.int64],
    tokens: NDArray[np.int64],
) -> list[Outcome]:
    """Runs `run_trials` on rows from files."""
    return run_trials(planned, Reader(files), positions, tokens)


@lru_cache(maxsize=1)
def _scorer(base: Path, precision: Precision) -> Scorer:
    """Returns the scorer, cached in the worker process, because loading the model takes longer than a short task."""
    return Scorer(base, precision)
