"""Stores the hidden states of models at the positions of a text, in a memory-mapped file for each (text, model).

`RowReader` computes distributions from them. The name of a file is a hash of all inputs of its content, and files
appear atomically. So hidden states of another model, adapter or text are never reused, and an interrupted evaluation
continues with the next file.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor

from privmix.laboratory.evaluation.options import Precision
from privmix.laboratory.evaluation.scoring import Head

# Increase it after a change of how hidden states are computed or stored, so that older files are not used.
_FORMAT = 5
HIDDEN_TYPE = np.float32


def row_file(base: str, adapter: str | None, part_kind: str | None, text: str, precision: Precision) -> str:
    """Returns the name of the file with a model's hidden states, a hash of all that determines them.

    Args:
        base: the revision of the base model.
        adapter: the SHA-256 of the adapter; None for the base model.
        part_kind: what the adapter is; None for the base model.
        text: the digest of the text.
    """
    content = json.dumps([_FORMAT, base, adapter, part_kind, text, precision])
    return f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.npy"


@contextmanager
def writing(path: Path, shape: tuple[int, int]) -> Iterator[Callable[[int, Tensor], None]]:
    """Writes a file of `shape` [positions, D], which appears when the block ends.

    Yields a function that writes hidden states [n, D] from a position on.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        file: np.memmap[Any, Any] = open_memmap(temporary, mode="w+", dtype=HIDDEN_TYPE, shape=shape)  # type: ignore[no-untyped-call]

        def put(first: int, hidden: Tensor) -> None:
            file[first : first + len(hidden)] = hidden.float().cpu().numpy()

        yield put
        file.flush()
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> NDArray[np.floating]:
    """Returns a file's hidden states [positions, D], which are read from the disk as they are used."""
    hidden: NDArray[np.floating] = np.load(path, mmap_mode="r", allow_pickle=False)
    return hidden


def is_whole(path: Path, positions: int) -> bool:
    """Returns whether a file is intact and has the hidden states of `positions` positions."""
    try:
        hidden = read(path)
    except (OSError, ValueError, EOFError):
        return False
    return hidden.ndim == 2 and len(hidden) == positions and hidden.dtype == HIDDEN_TYPE


@dataclass(frozen=True)
class EnsembleRows:
    """Names the files of one ensemble.

    Attributes:
        head: the base model's output layer (`scoring.Head`).
        public: its hidden states.
        models: the hidden states of the ensemble's models in the order of their numbers.
        original: the head and the hidden states of the public model under a private base, whose files `head` and
            `public` are then; None for an ensemble on a public model.
    """

    head: Path
    public: Path
    models: tuple[Path, ...]
    original: tuple[Path, Path] | None = None


class RowReader:
    """Computes log-probabilities of an ensemble at given positions.

    Args:
        head: the base model's output layer.
        public: the base model's hidden states, [positions, D].
        models: those of the ensemble's models, in the order of their numbers.
        original: the head and the hidden states of the public model under a private base.
    """

    def __init__(
        self,
        head: Head,
        public: NDArray[np.floating],
        models: Sequence[NDArray[np.floating]],
        original: tuple[Head, NDArray[np.floating]] | None = None,
    ) -> None:
        self._head = head
        self._original = original
        self._public = public
        self._models = models
        self.rows = len(models)
        self.vocabulary = head.vocabulary

    @classmethod
    def open(cls, files: EnsembleRows) -> Self:
        """Opens files, which are read as they are used."""
        models = [read(path) for path in files.models]
        original = None if files.original is None else (_head(files.original[0]), read(files.original[1]))
        return cls(_head(files.head), read(files.public), models, original)

    def __call__(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Returns float32 [S, V] of the base model and [S * rows, V] of the ensemble's models, grouped by position."""
        public = torch.from_numpy(np.array(self._public[positions]))
        if not self._models:
            hidden = np.empty((0, self._public.shape[1]), HIDDEN_TYPE)
        else:
            hidden = np.stack([hidden[positions] for hidden in self._models], axis=1)
        rows = torch.from_numpy(hidden.reshape(-1, self._public.shape[1]))
        return self._head.log_probabilities(public), self._head.log_probabilities(rows)

    def original(self, positions: NDArray[np.int64]) -> Tensor | None:
        """Returns float32 [S, V] of the public model under a private base; None where the base model is public."""
        if self._original is None:
            return None
        head, hidden = self._original
        return head.log_probabilities(torch.from_numpy(np.array(hidden[positions])))


@lru_cache(maxsize=2)
def _head(path: Path) -> Head:
    return Head.load(path)
