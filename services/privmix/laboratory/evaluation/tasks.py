"""Implements the Ray tasks of an evaluation: they compute rows for some models, or trials of some protocols in a run.

Tasks read and write files in the evaluation's directory, so all machines of the cluster must share it.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from privmix.engine.engine import AdapterFiles
from privmix.laboratory.evaluation.options import Precision
from privmix.laboratory.evaluation.rows import EnsembleRows, RowReader, writing
from privmix.laboratory.evaluation.scoring import Scorer
from privmix.laboratory.evaluation.text import EvaluationText
from privmix.laboratory.evaluation.trial import TrialResult, run_trials
from privmix.privacy.protocol import Protocol
from privmix.privacy.settings import Settings


def score_base(base: Path, text: EvaluationText, precision: Precision, states: Path, head: Path) -> None:
    """Writes the base model's output layer and its hidden states."""
    _scorer(base, precision).head.save(head)
    score_adapters(base, text, precision, (), [states])


def score_adapters(
    base: Path, text: EvaluationText, precision: Precision, adapters: Sequence[AdapterFiles], states: Sequence[Path]
) -> None:
    """Writes the hidden states of adapters, each to its file; without any, those of the base model."""
    scorer = _scorer(base, precision)
    with ExitStack() as files:
        writers = [files.enter_context(writing(path, (text.positions, scorer.head.size))) for path in states]
        for model, index, hidden in scorer.hidden_states(text.blocks, adapters):
            writers[model](text.offsets[index], hidden)


def trials(
    planned: Sequence[tuple[Settings, Protocol]],
    files: EnsembleRows,
    positions: NDArray[np.int64],
    tokens: NDArray[np.int64],
    contexts: NDArray[np.int64],
) -> list[TrialResult]:
    """Runs `run_trials` on rows from files."""
    return run_trials(planned, RowReader.open(files), positions, tokens, contexts)


@lru_cache(maxsize=1)
def _scorer(base: Path, precision: Precision) -> Scorer:
    """Returns the scorer, cached in the worker process, because loading the model takes longer than a short task."""
    return Scorer(base, precision)
