"""Computes LoRA products on a GPU for batches in which most rows with an adapter are single tokens.

vLLM's kernels launch blocks for each pair of a stretch of rows and an adapter, of which almost all end without work;
they add the parts of a shrink with float atomics, so that the bits of a row differ between two runs of one batch; and
each step stops five times for what the device must tell the host. Here rows are sorted by adapter on the host, and
divided into tiles of rows with one adapter. `shrink` multiplies the rows of a tile with A, split over the inputs, and
`expand` adds the splits in order and multiplies with B: two launches for each layer, whatever its slices.

- The number of tiles, and with it the grid, depends on the number of rows and of slots alone: tiles that no adapter
  needs are empty. So a graph can hold the kernels, and launches say nothing of a draw. As before, the time to read the
  weights follows the number of distinct adapters in a step, which a draw of parts determines.
- A row is multiplied in the same order whichever rows share its tile, so its bits depend neither on its neighbours nor
  on the run. They may depend on the height of the tiles, which follows from the number of rows; where vLLM is asked for
  batch-invariant kernels, it is always the least.
"""

import os
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_RANK = 128
"""The maximum rank of an adapter: that of a tile's products in registers."""
SPLITS = 4
"""Into how many parts a shrink divides its inputs, so that few tiles fill a GPU."""
INPUTS = 128
"""The inputs that a shrink multiplies at once."""
OUTPUTS = 128
"""The outputs of a program of `expand`."""
HEIGHTS = (16, 32, 64)
"""The numbers of rows that a tile can have; a tensor core needs 16."""


class Tiles(NamedTuple):
    """Describes the rows with an adapter.

    Attributes:
        order: int32 [R], the rows of the batch, sorted by adapter slot.
        tiles: int32 [T, 3], of each tile the slot, its first place in `order`, and its number of rows, which may be 0.
        height: the most rows that a tile has.
    """

    order: Tensor
    tiles: Tensor
    height: int


def height_of(rows: int, slots: int) -> int:
    """Returns the height of tiles for so many rows that are divided among so many slots."""
    if int(os.environ.get("VLLM_BATCH_INVARIANT", "0")):
        return HEIGHTS[0]
    each = rows // max(1, min(rows, slots))
    return next((height for height in HEIGHTS if height >= each), HEIGHTS[-1])


def tiles_for(rows: int, slots: int) -> int:
    """Returns the number of tiles that any assignment of slots to the rows fits into."""
    return rows // height_of(rows, slots) + min(rows, slots)


def write_tiles(row_of: np.ndarray, slots: np.ndarray, count: int, order: np.ndarray, tiles: np.ndarray) -> None:
    """Sorts rows by their adapter and divides them into tiles.

    Args:
        row_of, slots: int [R], the rows and their adapter slots.
        count: the number of slots.
        order, tiles: receive what `Tiles` describes, [R] and [T, 3] for T of `tiles_for`.
    """
    height = height_of(len(slots), count)
    by_slot = np.argsort(slots, kind="stable")
    order[:] = row_of[by_slot]
    tiles[:] = 0
    used = np.bincount(slots, minlength=count)
    tiles_of = -(-used // height)
    total = int(tiles_of.sum())
    slot = np.repeat(np.arange(count), tiles_of)
    within = np.arange(total) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    tiles[:total, 0] = slot
    tiles[:total, 1] = (np.cumsum(used) - used)[slot] + within * height
    tiles[:total, 2] = np.minimum(used[slot] - within * height, height)


@triton.jit
def shrink_kernel(
    x,
    a_0,
    a_1,
    a_2,
    sums,
    order,
    tiles,
    inputs,
    x_row,
    rows,
    RANK: tl.constexpr,  # noqa: N803
    HEIGHT: tl.constexpr,  # noqa: N803
    INPUTS: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
):
    """Writes sums[slice, split, place] = x[order[place], part of the inputs] A[slot]^T in float32."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    slice_ = tl.program_id(2)
    slot = tl.load(tiles + tile * 3).to(tl.int64)
    first = tl.load(tiles + tile * 3 + 1)
    used = tl.load(tiles + tile * 3 + 2)
    if used > 0:
        a = a_0
        if slice_ == 1:
            a = a_1
        if slice_ == 2:
            a = a_2
        within = tl.arange(0, HEIGHT)
        live = within < used
        row = tl.load(order + first + within, mask=live, other=0).to(tl.int64)
        rank = tl.arange(0, RANK)
        total = tl.zeros((HEIGHT, RANK), tl.float32)
        for start in range(split * INPUTS, inputs, SPLITS * INPUTS):
            k = start + tl.arange(0, INPUTS)
            present = k < inputs
            states = tl.load(x + row[:, None] * x_row + k[None, :], mask=live[:, None] & present[None, :], other=0.0)
            weights = tl.load(
                a + slot * RANK * inputs + rank[:, None] * inputs + k[None, :], mask=present[None, :], other=0.0
            )
            total += tl.dot(states, tl.trans(weights), out_dtype=tl.float32)
        place = ((slice_ * SPLITS + split) * rows + first + within).to(tl.int64)
        tl.store(sums + place[:, None] * RANK + rank[None, :], total, mask=live[:, None])


@triton.jit
def expand_kernel(
    sums,
    b_0,
    b_1,
    b_2,
    y,
    order,
    tiles,
    width_0,
    width_1,
    width_2,
    offset_0,
    offset_1,
    offset_2,
    y_row,
    rows,
    RANK: tl.constexpr,  # noqa: N803
    HEIGHT: tl.constexpr,  # noqa: N803
    OUTPUTS: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
):
    """Adds (sum over splits of sums) B[slot]^T to y[order[place]], for one stretch of a slice's outputs."""
    tile = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(tiles + tile * 3).to(tl.int64)
    first = tl.load(tiles + tile * 3 + 1)
    used = tl.load(tiles + tile * 3 + 2)
    if used > 0:
        blocks_0 = tl.cdiv(width_0, OUTPUTS)
        blocks_1 = tl.cdiv(width_1, OUTPUTS)
        b = b_0
        width = width_0
        offset = offset_0
        slice_ = 0
        start = block * OUTPUTS
        if block >= blocks_0:
            b = b_1
            width = width_1
            offset = offset_1
            slice_ = 1
            start = (block - blocks_0) * OUTPUTS
        if block >= blocks_0 + blocks_1:
            b = b_2
            width = width_2
            offset = offset_2
            slice_ = 2
            start = (block - blocks_0 - blocks_1) * OUTPUTS
        within = tl.arange(0, HEIGHT)
        live = within < used
        row = tl.load(order + first + within, mask=live, other=0).to(tl.int64)
        rank = tl.arange(0, RANK)
        column = start + tl.arange(0, OUTPUTS)
        present = column < width
        total = tl.zeros((HEIGHT, RANK), tl.float32)
        for split in tl.static_range(SPLITS):
            place = ((slice_ * SPLITS + split) * rows + first + within).to(tl.int64)
            total += tl.load(sums + place[:, None] * RANK + rank[None, :], mask=live[:, None], other=0.0)
        weights = tl.load(
            b + slot * width * RANK + column[:, None] * RANK + rank[None, :], mask=present[:, None], other=0.0
        )
        added = tl.dot(total.to(weights.dtype), tl.trans(weights), out_dtype=tl.float32)
        at = y + row[:, None] * y_row + offset + column[None, :]
        written = live[:, None] & present[None, :]
        before = tl.load(at, mask=written, other=0.0).to(tl.float32)
        tl.store(at, (before + added).to(y.dtype.element_ty), mask=written)


class Slices(NamedTuple):
    """Holds the slices of a layer that adapters change.

    Attributes:
        a: the A matrices of each slice, [slots, 1, rank, inputs].
        b: the B matrices of each slice, [slots, 1, width, rank].
        offsets: the first output column of each slice.
    """

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    offsets: tuple[int, ...]


def add_lora(y: Tensor, x: Tensor, slices: Slices, rows: Tiles) -> None:
    """Adds to each row of y, [rows, outputs], the products of its row of x, [rows, inputs], with its adapter."""
    _, _, rank, inputs = slices.a[0].shape
    count, used = len(rows.order), len(slices.a)
    sums = torch.empty((used, SPLITS, count, rank), dtype=torch.float32, device=x.device)
    options = {"RANK": rank, "HEIGHT": rows.height, "SPLITS": SPLITS}
    tiles = len(rows.tiles)
    shrink_kernel[(tiles, SPLITS, used)](
        x,
        *_three(slices.a, slices.a[0]),
        sums,
        rows.order,
        rows.tiles,
        inputs,
        x.stride(0),
        count,
        INPUTS=INPUTS,
        **options,
    )
    widths = tuple(weights.shape[2] for weights in slices.b)
    blocks = sum(triton.cdiv(width, OUTPUTS) for width in widths)
    expand_kernel[(tiles, blocks)](
        sums,
        *_three(slices.b, slices.b[0]),
        y,
        rows.order,
        rows.tiles,
        *_three(widths, 0),
        *_three(slices.offsets, 0),
        y.stride(0),
        count,
        OUTPUTS=OUTPUTS,
        **options,
    )


def _three(values: tuple[Any, ...], otherwise: Any) -> tuple[Any, ...]:
    return values + (otherwise,) * (3 - len(values))
