"""Claim: the CPU's LoRA operators compute x + x A^T B^T of each row's adapter, with constant operations per batch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import set_num_threads  # bound before an engine of vLLM in this process makes torch's do nothing

pytest.importorskip("vllm")

from privmix.engine.lora_on_cpu import SOURCE, RowPunicaWrapper, compact
from privmix.foundation import compiled
from tests.support.steps import Operation, Operations

SLOTS, RANK, INPUTS, WIDTHS = 5, 3, 16, (8, 4, 4)
MERGED = ["layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj"]


def operators_of_rows() -> Any:
    built = compiled.operators(SOURCE)
    assert built is not None
    return built


def layer(targets: set[str], dtype: torch.dtype = torch.float32) -> Any:
    """Returns a stand-in for vLLM's merged qkv layer with random weights in all slots."""
    made = SimpleNamespace(
        lora_a_stacked=(torch.zeros(SLOTS, 1, 8, INPUTS, dtype=dtype),),
        lora_b_stacked=(),
        output_slices=WIDTHS,
        n_slices=3,
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


@pytest.mark.usefixtures("operators")
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_operator_rounds_each_output_once(dtype: torch.dtype) -> None:
    """Its sums are in float32, so an output is the nearest number of its type, or a neighbour, for any threads."""
    torch.manual_seed(0)
    tokens, slots, rank, inputs, width = 300, 7, 4, 576, 700
    y, x, shrink, expand = (
        torch.randn(shape).to(dtype)
        for shape in ((tokens, 2 * width), (tokens, inputs), (slots, 2 * rank, inputs), (slots, 2, rank, width))
    )
    x, expansions = x / 24, [weights.contiguous() for weights in expand.unbind(1)]
    rows = torch.arange(3, tokens)
    drawn = torch.randint(slots, (len(rows),))
    shrunk = (shrink.double()[drawn] @ x.double()[rows, :, None]).squeeze(2)
    expected = y.double()
    for index, weights in enumerate(expansions):
        part = shrunk[:, None, index * rank : (index + 1) * rank] @ weights.double()[drawn]
        expected[rows, index * width : (index + 1) * width] += part.squeeze(1)
    operator = operators_of_rows().add_lora_rows
    before = torch.get_num_threads()
    for threads in (1, 2):
        set_num_threads(threads)
        made = y.clone()
        operator(made, x, rows, drawn, shrink, expansions, [0, width])
        set_num_threads(before)
        torch.testing.assert_close(made.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("spoil", ["type", "layout"])
def test_the_compiled_operator_refuses_other_types_and_layouts(spoil: str) -> None:
    operator = operators_of_rows().add_lora_rows
    y, x = torch.zeros(4, 8), torch.zeros(4, INPUTS)
    x = x.double() if spoil == "type" else x.T.contiguous().T
    index = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="must be"):
        operator(y, x, index, index, torch.zeros(2, RANK, INPUTS), [torch.zeros(2, RANK, 8)], [0])


def test_the_operations_do_not_depend_on_the_requested_adapters(operators: str) -> None:
    """This includes a batch whose rows all use one adapter, as on a shard without drawn parts."""
    made, operations = layer({"q_proj"}), list[list[Operation]]()
    for drawn in ([1] * 40, [1, 2, 3, 2] * 10, [3] * 20 + [1, 2] * 10):
        x, y = torch.randn(47, INPUTS), torch.randn(47, sum(WIDTHS))
        operations.append([])
        with Operations(operations[-1]):
            run(made, [-1] * 7 + drawn, x, y, is_prefill=False)
    assert operations[0] == operations[1] == operations[2]
    assert len(operations[0]) > 5
    kinds = [kind for kind, *_ in operations[0]]
    assert kinds.count("privmix.add_lora_rows.default") == (1 if operators == "compiled" else 0)
