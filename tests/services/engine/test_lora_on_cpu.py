"""The CPU's LoRA products are x + x A^T B^T of each row's own adapter, whatever the batch looks like."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from services.engine.lora_on_cpu import RowPunicaWrapper, compact

SLOTS, RANK, INPUTS, WIDTHS = 5, 3, 16, (8, 4, 4)
MERGED = ["layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj"]


def layer(targets: set[str]) -> Any:
    """What vLLM's merged qkv layer is to these operators, with random weights in all slots."""
    made = SimpleNamespace(
        lora_a_stacked=(torch.zeros(SLOTS, 1, 8, INPUTS),), lora_b_stacked=(), output_slices=WIDTHS, n_slices=3
    )
    compact({"layers.0.qkv_proj": made}, {"layers.0.qkv_proj": MERGED}, targets, RANK)
    for weights in (*made.lora_a_stacked, *made.lora_b_stacked):
        weights.copy_(torch.randn(weights.shape))
    return made


def run(made: Any, slots: list[int], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    wrapper = RowPunicaWrapper(512, 512, "cpu")
    ids = [None, 30, 10, 20, None]  # by slot
    mapping = SimpleNamespace(index_mapping=tuple(ids[slot] if slot >= 0 else 0 for slot in slots))
    wrapper.update_metadata(mapping, ids, SLOTS, 0)
    wrapper.add_lora_linear(y, x, made.lora_a_stacked, made.lora_b_stacked, 1.0, made.output_slices)
    return y


@pytest.mark.parametrize("targets", [{"q_proj"}, {"q_proj", "v_proj"}, {"k_proj", "q_proj", "v_proj"}])
@pytest.mark.parametrize(
    "slots",
    [
        [-1] * 7,
        [-1] * 7 + [1, 2, 3, 1],
        [-1] * 7 + [1, 2, 3],
        [2],
        [-1, 1, -1, 2, 3, -1],
        [1] * 20 + [-1] * 3 + [2] * 30 + [3, 1, 3],
    ],
)
def test_each_row_gets_its_own_adapter(slots: list[int], targets: set[str]) -> None:
    torch.manual_seed(0)
    made = layer(targets)
    x, y = torch.randn(len(slots), INPUTS), torch.randn(len(slots), sum(WIDTHS))
    expected = y.clone()
    for row, slot in enumerate(slots):
        offset = 0
        for a, b, width in zip(made.lora_a_stacked, made.lora_b_stacked, WIDTHS, strict=True):
            if slot >= 0:
                expected[row, offset : offset + width] += b[slot, 0] @ (a[slot, 0] @ x[row])
            offset += width
    assert torch.allclose(run(made, slots, x, y), expected, atol=1e-4)


def test_slices_that_no_adapter_changes_hold_nothing() -> None:
    made = layer({"q_proj"})
    assert [weights.numel() for weights in made.lora_a_stacked] == [SLOTS * RANK * INPUTS, 0, 0]
    assert made.lora_a_stacked.shrink.numel() == SLOTS * RANK * INPUTS
