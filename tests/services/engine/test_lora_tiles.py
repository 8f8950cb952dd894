"""Claim: the GPU's LoRA products equal dense products, whatever the draw, and their grid says nothing of it.

Triton's interpreter runs the kernels on a CPU. It must be chosen before Triton is imported, so it has a process of its
own.
"""

import subprocess
import sys
from os import environ

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privmix.engine.lora_tiles import height_of, tiles_for, write_tiles

pytest.importorskip("triton")


@given(st.integers(1, 300), st.integers(1, 70), st.randoms(use_true_random=False))
def test_tiles_hold_each_row_once_beside_rows_of_its_adapter(rows: int, count: int, random: object) -> None:
    generator = np.random.default_rng(rows * 1000 + count)
    slots = generator.integers(generator.integers(1, count + 1), size=rows)
    row_of = generator.permutation(10 * rows)[:rows]
    order = np.empty(rows, dtype=np.int32)
    tiles = np.full((tiles_for(rows, count), 3), -1, dtype=np.int32)
    write_tiles(row_of, slots, count, order, tiles)
    slot_of_row = dict(zip(row_of.tolist(), slots.tolist(), strict=True))
    seen: list[int] = []
    for slot, first, used in tiles.tolist():
        assert 0 <= used <= height_of(rows, count)
        members = order[first : first + used].tolist()
        assert all(slot_of_row[row] == slot for row in members)
        seen += members
    assert sorted(seen) == sorted(row_of.tolist())


def test_tiles_have_one_height_where_rows_must_have_the_same_bits_in_each_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [(64, 65), (1024, 65), (4096, 65)]
    assert len({height_of(*shape) for shape in shapes}) > 1
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert len({height_of(*shape) for shape in shapes}) == 1


CHECK = """
import numpy as np, torch
from privmix.engine.lora_tiles import Slices, Tiles, add_lora, height_of, tiles_for, write_tiles

def check(sequences, readers, slots, inputs, widths, rank, drawn):
    generator = np.random.default_rng(0)
    torch.manual_seed(0)
    rows = sequences * readers
    x = torch.randn(sequences * (1 + readers), inputs)
    y = torch.randn(sequences * (1 + readers), sum(widths) + 40)
    a = tuple(torch.randn(slots, 1, rank, inputs) for _ in widths)
    b = tuple(torch.randn(slots, 1, width, rank) for width in widths)
    offsets = tuple(int(first) + 7 for first in np.cumsum([0, *widths[:-1]]))
    chosen = np.concatenate([np.sort(generator.choice(drawn, readers, replace=False)) for _ in range(sequences)])
    places = np.arange(len(x)).reshape(sequences, -1)[:, 1:].ravel()
    order = np.empty(rows, np.int32)
    tiles = np.empty((tiles_for(rows, slots), 3), np.int32)
    write_tiles(places, chosen, slots, order, tiles)
    expected = y.clone()
    for place, slot in zip(places, chosen):
        for a_slice, b_slice, offset, width in zip(a, b, offsets, widths):
            expected[place, offset : offset + width] += b_slice[slot, 0] @ (a_slice[slot, 0] @ x[place])
    given = Tiles(torch.from_numpy(order), torch.from_numpy(tiles), height_of(rows, slots))
    add_lora(y, x, Slices(a, b, offsets), given)
    print(float((y - expected).abs().max() / expected.abs().max()))

check(3, 4, 6, 300, (96,), 16, 5)
check(5, 2, 9, 130, (150, 150), 16, 9)
check(20, 3, 4, 140, (64, 30, 30), 32, 3)
check(1, 1, 2, 576, (576,), 16, 1)
"""


def test_products_equal_dense_ones() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={**environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert printed.returncode == 0, printed.stderr[-2000:]
    errors = [float(line) for line in printed.stdout.split() if line[0].isdigit()]
    assert len(errors) == 4
    assert max(errors) < 1e-5
