"""Claim: the CPU's LoRA operators compute x + x A^T B^T of each row's adapter, with constant operations per batch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("vllm")

from services.engine.lora_on_cpu import RowPunicaWrapper, compact

SLOTS, RANK, INPUTS, WIDTHS = 5, 3, 16, (8, 4, 4)
MERGED = ["layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj"]


def layer(targets: set[str]) -> Any:
    """Returns a stand-in for vLLM's merged qkv layer with random weights in all slots."""
    made = SimpleNamespace(
        lora_a_stacked=(torch.zeros(SLOTS, 1, 8, INPUTS),), lora_b_stacked=(), output_slices=WIDTHS, n_slices=3
    )
    compact({"layers.0.qkv_proj": made}, {"layers.0.qkv_proj": MERGED}, targets, RANK)
    for weights in (*made.lora_a_stacked, *made.lora_b_stacked):
        weights.copy_(torch.randn(weights.shape))
    return made


def run(made: Any, slots: list[int], x: torch.Tensor, y: torch.Tensor, is_prefill: bool = True) -> torch.Tensor:
    wrapper = RowPunicaWrapper(512, 512, "cpu")
    ids = [None, 30, 10, 20, None]  # by slot
    mapping = SimpleNamespace(
        index_mapping=tuple(ids[slot] if slot >= 0 else 0 for slot in slots), is_prefill=is_prefill
    )
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
    for is_prefill in (True, False):
        assert torch.allclose(run(made, slots, x, y.clone(), is_prefill), expected, atol=1e-4)


class Recorded(TorchDispatchMode):
    """Records the operations that run, with the shapes of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append((func, [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


def test_the_operations_do_not_depend_on_the_requested_adapters() -> None:
    """This includes a batch whose rows all use one adapter, as on a shard without drawn parts."""
    made, operations = layer({"q_proj"}), []
    for drawn in ([1] * 40, [1, 2, 3, 2] * 10, [3] * 20 + [1, 2] * 10):
        x, y = torch.randn(47, INPUTS), torch.randn(47, sum(WIDTHS))
        with Recorded() as recorded:
            run(made, [-1] * 7 + drawn, x, y, is_prefill=False)
        operations.append(recorded.operations)
    assert operations[0] == operations[1] == operations[2]
    assert len(operations[0]) > 5


def test_slices_without_adapters_are_empty() -> None:
    made = layer({"q_proj"})
    assert [weights.numel() for weights in made.lora_a_stacked] == [SLOTS * RANK * INPUTS, 0, 0]
    assert made.lora_a_stacked.shrink.numel() == SLOTS * RANK * INPUTS
