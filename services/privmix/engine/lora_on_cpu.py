"""Implements LoRA products for vLLM's CPU build, for batches in which most rows with an adapter are single tokens.

vLLM's reference operators process each slice of qkv and gate_up separately, convert to float32, and gather a copy of
padded weights for every token of the batch, even for tokens without an adapter. This implementation

- reads only rows with an adapter, and allocates no slices for modules that no adapter changes;
- concatenates the A matrices of a layer, so that one product shrinks a row for all slices;
- computes all products of a layer's rows in one compiled operator (`lora_rows`), and in batched products where no
  compiler is found or in float16;
- computes the indices once in a step.

The number and the shapes of the operations depend only on the number of rows, not on which adapters the rows use. The
exception is a mapping with `is_prefill`: a run of many tokens with one adapter, a plain LoRA, becomes one
product. GPU builds use vLLM's own kernels.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

from privmix.engine.adapter_slots import slots_by_id
from privmix.engine.step_graph import StepShape
from privmix.foundation import compiled

MIN_RUN = 16
"""The minimum length of a run of tokens with one adapter that becomes one product."""
SOURCE = Path(__file__).with_name("lora_rows.cpp")
TYPES = (torch.float32, torch.bfloat16)
"""The types of rows and weights that the compiled operator supports."""


class Expansion(NamedTuple):
    """Holds the B matrices of one slice, [slots, rank, width], and the first output column that they add to."""

    weights: torch.Tensor
    offset: int


class LayerWeights(tuple[torch.Tensor, ...]):
    """Looks to vLLM like a layer's stacked A matrices, [slots, 1, rank, inputs] for each slice, which are its views.

    Attributes:
        shrink: the concatenated A matrices of all slices, [slots, slices * rank, inputs].
        expansions: the B matrices of each slice.
        add_rows: the compiled operator, if it supports the type of the weights.
    """

    shrink: torch.Tensor
    expansions: list[Expansion]
    add_rows: Callable[..., Any] | None


def compact(
    layers: dict[str, BaseLinearLayerWithLoRA], packed: dict[str, list[str]], targets: set[str], rank: int
) -> None:
    """Replaces the layers' empty stacked weights by `LayerWeights` of the adapters' rank and target modules.

    Args:
        layers: vLLM's layers with LoRA, by name.
        packed: the modules that each merged layer merges, in the order of its slices.
        targets: the last name components of the modules that adapters change.
        rank: the adapters' maximum rank.
    """
    for name, layer in layers.items():
        modules = packed.get(name, [name])
        changed = [module.rpartition(".")[-1] in targets for module in modules]
        slots, _, _, inputs = layer.lora_a_stacked[0].shape
        options = {"dtype": layer.lora_a_stacked[0].dtype}
        shrink = torch.zeros(slots, sum(changed) * rank, inputs, **options)
        stacked_a, stacked_b, expansions = [], [], []
        offset = used = 0
        for is_changed, width in zip(changed, layer.output_slices, strict=True):
            slice_rank = rank if is_changed else 0
            stacked_a.append(shrink[:, None, used : used + slice_rank])
            expansion = torch.zeros(slots, slice_rank, width, **options)
            stacked_b.append(expansion.transpose(1, 2)[:, None])
            if is_changed:
                expansions.append(Expansion(expansion, offset))
            used += slice_rank
            offset += width
        weights = LayerWeights(stacked_a)
        weights.shrink, weights.expansions = shrink, expansions
        operators = compiled.operators(SOURCE) if shrink.dtype in TYPES else None
        weights.add_rows = operators and operators.add_lora_rows
        layer.lora_a_stacked, layer.lora_b_stacked = weights, tuple(stacked_b)


class RowPunicaWrapper(PunicaWrapperCPU):  # type: ignore[misc]
    """Computes the LoRA products of layers whose weights are `LayerWeights`. Implements `ReaderAdapters`."""

    def update_metadata(
        self, mapping: Any, lora_index_to_id: Sequence[int | None], max_loras: int, vocab_size: int, **_: Any
    ) -> None:
        slots = slots_by_id(lora_index_to_id)[np.array(mapping.index_mapping, dtype=np.int64)]
        starts = np.flatnonzero(np.diff(slots, prepend=-2))
        lengths = np.diff(starts, append=len(slots))
        long = (lengths >= MIN_RUN) & (slots[starts] >= 0) & mapping.is_prefill
        self._runs = [
            (int(start), int(start + length), int(slots[start]))
            for start, length in zip(starts[long], lengths[long], strict=True)
        ]
        rows = np.flatnonzero((slots >= 0) & ~np.repeat(long, lengths))
        self._rows, self._slots = torch.from_numpy(rows), torch.from_numpy(slots[rows])

    def integers_for(self, shape: StepShape) -> int:
        return shape.sequences * shape.readers

    def write_adapters(self, shape: StepShape, slots: np.ndarray, out: np.ndarray) -> None:
        out[:] = slots.ravel()

    def use_adapters(self, shape: StepShape, integers: torch.Tensor) -> None:
        self._runs = []
        self._rows = torch.arange(shape.rows).view(shape.sequences, 1 + shape.readers)[:, 1:].flatten()
        self._slots = integers.long()

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        if not isinstance(lora_a_stacked, LayerWeights):
            return  # no adapters are loaded yet
        for start, end, slot in self._runs:
            self._add_run(y[start:end], x[start:end], lora_a_stacked, slot)
        if not len(self._rows):
            return
        if lora_a_stacked.add_rows is None:
            self._add_rows(y, x, lora_a_stacked)
        else:
            weights = [expansion.weights for expansion in lora_a_stacked.expansions]
            offsets = [expansion.offset for expansion in lora_a_stacked.expansions]
            lora_a_stacked.add_rows(y, x, self._rows, self._slots, lora_a_stacked.shrink, weights, offsets)

    def _add_run(self, y: torch.Tensor, x: torch.Tensor, weights: LayerWeights, slot: int) -> None:
        shrunk = (x @ weights.shrink[slot].T).chunk(len(weights.expansions), dim=1)
        for part, (expansion, offset) in zip(shrunk, weights.expansions, strict=True):
            y[:, offset : offset + expansion.shape[2]].addmm_(part, expansion[slot])

    def _add_rows(self, y: torch.Tensor, x: torch.Tensor, weights: LayerWeights) -> None:
        shrunk = torch.bmm(x[self._rows, None], weights.shrink.index_select(0, self._slots).transpose(1, 2))
        for part, (expansion, offset) in zip(shrunk.chunk(len(weights.expansions), 2), weights.expansions, strict=True):
            added = torch.bmm(part, expansion.index_select(0, self._slots))[:, 0]
            y[:, offset : offset + expansion.shape[2]].index_add_(0, self._rows, added)


def install() -> None:
    """Makes vLLM's CPU platform use `RowPunicaWrapper`."""
    type(current_platform).get_punica_wrapper = classmethod(lambda _cls: f"{__name__}.{RowPunicaWrapper.__qualname__}")
