"""Vocabulary rows in blocks: how many to work on at once, scratch space that is kept, and one number a row."""

import math
import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# One number for each row of a block. Such bookkeeping is cheaper in NumPy than in PyTorch.
Column = NDArray[np.float64]

# Bytes of a block, over which several passes go. On a CPU a small one stays in cache, a large one takes fewer calls; on
# a GPU it fills the device.
_SMALLEST, _LARGEST, _GPU = 3 * 2**18, 2**21, 2**28
_BLOCKS = 8


class _Kept(threading.local):
    """Scratch space of one thread: memory by name, and the tensors last made of it by name, shape and type."""

    def __init__(self) -> None:
        self.memory: dict[str, Tensor] = {}
        self.tensors: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}


_kept = _Kept()


def rows_at_once(rows: Tensor) -> int:
    """Rows of [R, V] that make a block; at least 1."""
    row = max(1, rows.shape[1] * rows.element_size())
    if rows.device.type != "cpu":
        return max(1, _GPU // row)
    return max(1, min(max(_SMALLEST, len(rows) * row // _BLOCKS), _LARGEST) // row)


def scratch(name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised memory of the shape of ``like``, overwritten by the thread's next call with the same name.

    On a CPU, touching fresh pages costs as much as several passes over a block, so blocks are kept. A GPU's allocator
    keeps them itself.
    """
    dtype = dtype or like.dtype
    if like.device.type != "cpu":
        return torch.empty_like(like, dtype=dtype)
    wanted = (name, like.shape, dtype)
    if wanted not in _kept.tensors:
        size = math.prod(like.shape) * dtype.itemsize
        if name not in _kept.memory or len(_kept.memory[name]) < size:
            _kept.tensors.clear()  # those made of the memory that is let go
            _kept.memory[name] = torch.empty(size, dtype=torch.uint8)
        _kept.tensors[wanted] = _kept.memory[name][:size].view(dtype).view(like.shape)
    return _kept.tensors[wanted]


def row_sums(rows: Tensor) -> Column:
    """Sums of rows, pairwise: a running sum would lose the many tokens whose probability is tiny."""
    return to_column(rows.sum(dim=1))


def to_column(values: Tensor) -> Column:
    """One number for each row, as float64."""
    return np.asarray(values.cpu().numpy(), dtype=np.float64)


def column(values: NDArray[np.float64] | NDArray[np.bool_], like: Tensor) -> Tensor:
    """[C, 1], to be used with rows ``like`` [C, V]."""
    return torch.from_numpy(values.astype(_NUMPY[like.dtype])[:, None]).to(like.device)


_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
