"""Distributions that were computed once, on disk: a memory-mapped file for each (text, model).

The public model's rows are float32 log-probabilities. A part's are float16 differences from the public row: a float16
log-probability of -12 is off by up to 0.004, a difference of 0.5 by 0.0002, and it is differences that protocols work
on. So a file is half as large, and a part's probability is off by 2**-11 of its log-ratio to the public model's: where
that is within a radius, by less than a thousandth of the radius.

A file's name is a hash of everything its rows follow from, and it appears whole. So rows of another model, adapter or
text are never found, and an evaluation that was stopped goes on with the next file.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor

from services.evaluation.scoring import Precision
from services.training.options import Attention

# A change in how rows are computed or kept must not find those of the old way.
_FORMAT = 2
PUBLIC_TYPE, PART_TYPE = np.float32, np.float16


@dataclass(frozen=True)
class Origin:
    """What a file of rows follows from.

    Attributes:
        base: revision of the base model.
        adapter: SHA-256 of the adapter; None for the base model itself.
        attention: whose keys and values the adapter attends to; None for the base model itself.
        text: digest of the text.
        precision: in which the models are evaluated.
    """

    base: str
    adapter: str | None
    attention: Attention | None
    text: str
    precision: Precision

    @property
    def file(self) -> str:
        content = json.dumps([_FORMAT, *astuple(self)])
        return f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.npy"


@contextmanager
def writing(path: Path, shape: tuple[int, int], dtype: type) -> Iterator[Callable[[int, Tensor], None]]:
    """A new file of `shape` [positions, V], which appears when the block ends.

    The function that the block gets takes the position of the first of some rows [n, V], and those.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        file: np.memmap[Any, Any] = open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)  # type: ignore[no-untyped-call]

        def put(first: int, rows: Tensor) -> None:
            file[first : first + len(rows)] = rows.cpu().numpy()

        yield put
        file.flush()
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> NDArray[np.floating]:
    """A file's rows [positions, V], from disk as they are used."""
    rows: NDArray[np.floating] = np.load(path, mmap_mode="r", allow_pickle=False)
    return rows


def whole(path: Path, positions: int) -> bool:
    """Whether there are rows for so many positions; what is left of a damaged file does not count."""
    try:
        rows = read(path)
    except (OSError, ValueError, EOFError):
        return False
    return rows.ndim == 2 and len(rows) == positions and rows.dtype in (PUBLIC_TYPE, PART_TYPE)


@dataclass(frozen=True)
class EnsembleRows:
    """The files of one ensemble: the public model's, and those of its models in the order of their numbers."""

    public: Path
    models: tuple[Path, ...]


class Reader:
    """Log-probabilities of an ensemble at some positions."""

    def __init__(self, files: EnsembleRows) -> None:
        self._public = read(files.public)
        self._models = [read(path) for path in files.models]
        self.models = len(self._models)
        self.vocabulary: int = self._public.shape[1]

    def __call__(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """float32 [S, V] of the public model, and [S * models, V] of all models, the rows of a position together."""
        public = torch.from_numpy(np.array(self._public[positions]))
        differences = np.stack([rows[positions] for rows in self._models], axis=1)
        parts = torch.from_numpy(differences).float().add_(public[:, None])
        return public, parts.flatten(0, 1)
