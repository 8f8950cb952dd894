"""Lets vLLM compute LoRA products on a GPU with the kernels of `lora_tiles`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.platforms import current_platform

from privmix.engine.adapter_slots import slots_by_id
from privmix.engine.lora_tiles import Slices, Tiles, add_lora, height_of, tiles_for, write_tiles
from privmix.engine.step_graph import StepShape


class TilePunicaWrapper(PunicaWrapperGPU):  # type: ignore[misc]
    """Computes the LoRA products of rows with `add_lora`. Implements `ReaderAdapters`."""

    rows: Tiles | None = None
    _changed: Mapping[int, Slices] | None = None

    def load(self, layers: Mapping[str, Any], packed: Mapping[str, list[str]], targets: set[str]) -> None:
        """Learns which slices of vLLM's layers the adapters change.

        Args:
            packed: the modules that each merged layer merges, in the order of its slices.
            targets: the last name components of the modules that adapters change.
        """
        self._changed = {
            layer.lora_a_stacked[0].data_ptr(): _changed_slices(layer, packed.get(name, [name]), targets)
            for name, layer in layers.items()
        }

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **_: Any
    ) -> None:
        slots = slots_by_id(lora_index_to_id)[np.array(mapping.index_mapping, dtype=np.int64)]
        row_of = np.flatnonzero(slots >= 0)
        self.rows = None
        if len(row_of):
            count = self.max_loras
            integers = np.empty(len(row_of) + 3 * tiles_for(len(row_of), count), dtype=np.int32)
            _write(row_of, slots[row_of], count, integers)
            self.rows = _read(torch.from_numpy(integers).to(self.device), len(row_of), count)

    def integers_for(self, shape: StepShape) -> int:
        rows = shape.sequences * shape.readers
        return rows + 3 * tiles_for(rows, self.max_loras)

    def write_adapters(self, shape: StepShape, slots: np.ndarray, out: np.ndarray) -> None:
        places = np.arange(shape.rows).reshape(shape.sequences, 1 + shape.readers)[:, 1:]
        _write(places.ravel(), slots.ravel(), self.max_loras, out)

    def use_adapters(self, shape: StepShape, integers: Tensor) -> None:
        rows = shape.sequences * shape.readers
        self.rows = _read(integers, rows, self.max_loras) if rows else None

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        if self._changed is None or self.rows is None:
            return  # no adapters are loaded yet, or no row has one
        if (slices := self._changed[lora_a_stacked[0].data_ptr()]).a:
            add_lora(y, x, slices, self.rows)


def _changed_slices(layer: Any, modules: list[str], targets: set[str]) -> Slices:
    changed = [index for index, module in enumerate(modules) if module.rpartition(".")[-1] in targets]
    firsts = np.cumsum([0, *layer.output_slices])
    return Slices(
        tuple(layer.lora_a_stacked[index] for index in changed),
        tuple(layer.lora_b_stacked[index] for index in changed),
        tuple(int(firsts[index]) for index in changed),
    )


def _write(row_of: np.ndarray, slots: np.ndarray, count: int, out: np.ndarray) -> None:
    write_tiles(row_of, slots, count, out[: len(row_of)], out[len(row_of) :].reshape(-1, 3))


def _read(integers: Tensor, rows: int, count: int) -> Tiles:
    return Tiles(integers[:rows], integers[rows:].view(-1, 3), height_of(rows, count))


def install() -> None:
    """Makes vLLM's CUDA platform use `TilePunicaWrapper`."""
    type(current_platform).get_punica_wrapper = classmethod(lambda _cls: f"{__name__}.{TilePunicaWrapper.__qualname__}")
