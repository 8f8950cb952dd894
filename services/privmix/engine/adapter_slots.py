"""Decides which adapters occupy the adapter slots of the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager


class AdapterSlots:
    """Keeps all adapters in host memory and fills the device's slots with those that a step needs.

    If all adapters fit into the slots, it loads each of them once and drops the host's copies; a step then loads none.
    Otherwise each row of a step costs exactly one load, even if its adapter is already on the device: so the time of a
    step does not depend on the draw.
    """

    def __init__(self, worker_manager: LRUCacheWorkerLoRAManager, adapters: Sequence[LoRARequest], zero: int) -> None:
        self._manager: Any = worker_manager._adapter_manager
        self._resident = len(adapters) < self._manager.lora_slots
        models = (worker_manager._load_adapter(adapter) for adapter in adapters)
        first = next(models, LoRAModel(zero, 1, {}))
        self._add(_zero_like(first, zero))
        if adapters:
            self._add(first)
        for model in models:
            self._add(model)

    def _add(self, model: LoRAModel) -> None:
        self._manager.add_adapter(model)
        if self._resident:
            self._manager.activate_adapter(model.id)
            model.loras.clear()  # vLLM reads only the slot from now on

    def bring(self, adapters: np.ndarray) -> None:
        """Loads the adapters of a step's rows, int [rows], of which no more than there are slots may be distinct."""
        for adapter in [] if self._resident else adapters.tolist():
            self._load(adapter)

    def slots_of(self, adapters: np.ndarray) -> np.ndarray:
        """Returns the slots of adapters that have one, int of any shape."""
        slots: np.ndarray = slots_by_id(self._manager.lora_index_to_id)[adapters]
        return slots

    def _load(self, adapter: int) -> None:
        self._manager.deactivate_adapter(adapter)
        self._manager.activate_adapter(adapter)


def slots_by_id(lora_index_to_id: Sequence[int | None]) -> np.ndarray:
    """Returns the slot of each LoRA id, int [ids]; -1 for those that have none.

    Args:
        lora_index_to_id: the LoRA id in each slot, as vLLM keeps them.
    """
    slots = np.full(max([0, *filter(None, lora_index_to_id)]) + 1, -1)
    for slot, lora_id in enumerate(lora_index_to_id):
        if lora_id is not None:
            slots[lora_id] = slot
    return slots


def _zero_like(model: LoRAModel, lora_id: int) -> LoRAModel:
    """Returns an adapter of the same shapes with zero weights. It takes the same time to load."""
    zero = model.clone(lora_id)
    zero.loras = {
        name: LoRALayerWeights(
            name, weights.rank, weights.lora_alpha, torch.zeros_like(weights.lora_a), torch.zeros_like(weights.lora_b)
        )
        for name, weights in model.loras.items()
    }
    return zero
