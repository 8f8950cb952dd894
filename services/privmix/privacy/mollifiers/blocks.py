"""Processes vocabulary rows in blocks: block sizes, reusable scratch memory, and columns of numbers."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from privmix.foundation.lazily import torch

if TYPE_CHECKING:
    from torch import Tensor

# One number for each row of a block. NumPy is faster than PyTorch for such small arrays.
Column = NDArray[np.float64]

# Block sizes in bytes; several passes read each block. On a CPU, small blocks stay in cache and large blocks need fewer
# calls; on a GPU, a block fills the device.
_MIN_BLOCK, _MAX_BLOCK, _GPU = 3 * 2**18, 2**21, 2**28
_BLOCKS = 8
_LEAST_POWER = -90.0  # as in `rows.cpp`


class _Kept(threading.local):
    """Holds the scratch memory of one thread by name, and the tensors on it by name, shape and type."""

    def __init__(self) -> None:
        self.memory: dict[str, Tensor] = {}
        self.tensors: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}


_kept = _Kept()


def rows_at_once(rows: Tensor) -> int:
    """Returns the number of rows of [R, V] in a block, at least 1."""
    row = max(1, rows.shape[1] * rows.element_size())
    if rows.device.type != "cpu":
        return max(1, _GPU // row)
    return max(1, min(max(_MIN_BLOCK, len(rows) * row // _BLOCKS), _MAX_BLOCK) // row)


def scratch(name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns uninitialised memory with the shape of ``like``. The thread's next call with the same name reuses it.

    On a CPU, the first access to new pages costs as much as several passes over a block, so blocks are reused. On a
    GPU, PyTorch's allocator does this.
    """
    dtype = dtype or like.dtype
    if like.device.type != "cpu":
        return torch.empty_like(like, dtype=dtype)
    wanted = (name, like.shape, dtype)
    if wanted not in _kept.tensors:
        size = math.prod(like.shape) * dtype.itemsize
        if name not in _kept.memory or len(_kept.memory[name]) < size:
            _kept.tensors.clear()  # some of them use the memory that is replaced now
            _kept.memory[name] = torch.empty(size, dtype=torch.uint8)
        _kept.tensors[wanted] = _kept.memory[name][:size].view(dtype).view(like.shape)
    return _kept.tensors[wanted]


def powers_of_two(exponents: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns 2^x; on a CPU by `exp`, because torch's `exp2` (2.13.0, AVX2) rounds a number at a block's end otherwise.

    There the least result is 2^-90, which times p0 is a normal number: subnormal ones take many times as long.
    """
    if exponents.device.type == "cpu":
        return torch.clamp(exponents, min=_LEAST_POWER, out=out).mul_(math.log(2)).exp_()
    return torch.exp2(exponents, out=out)


def totals(values: Tensor) -> Tensor:
    """Sums the last dimension: [..., V] to [..., 1].

    On a CPU the order of the additions depends on V alone, not on the number of rows or threads: torch would divide a
    single row among its threads, and divides two by rows.
    """
    if values.device.type == "cpu" and values.numel() == values.shape[-1]:
        return values.expand(2, *values.shape).sum(dim=-1, keepdim=True)[0]
    return values.sum(dim=-1, keepdim=True)


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copies values from the host to a device. A GPU reads page-locked memory, so neither side waits for the other."""
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def row_sums(rows: Tensor) -> Column:
    """Sums rows pairwise: a running sum would lose the many tokens with tiny probabilities."""
    return to_column(rows.sum(dim=1))


def to_column(values: Tensor) -> Column:
    """Converts a tensor with one number for each row to float64."""
    return np.asarray(values.cpu().numpy(), dtype=np.float64)


def column(values: NDArray[np.float64] | NDArray[np.bool_], like: Tensor) -> Tensor:
    """Converts a column to a tensor [C, 1] with the type and device of ``like`` [C, V]."""
    kind = np.float64 if like.dtype == torch.float64 else np.float32
    return on_device(values.astype(kind)[:, None], like.device)
