"""Which adapters lie in the slots of the device."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager


class AdapterSlots:
    """Keeps all adapters in host memory and as many of them on the device as it has slots.

    Where all adapters fit, all are loaded once, the host's copies are dropped, and a step loads nothing. Where they do
    not fit, each row of a step costs one load of its adapter, whether or not that adapter is on the device: in
    `prepare`, ahead of the step, or else in the step. The number of loads in a step thus depends on how many rows it
    has and how many of them were announced, and not on which adapters they ask.
    """

    def __init__(self, worker_manager: LRUCacheWorkerLoRAManager, adapters: Sequence[LoRARequest], zero: int) -> None:
        self._manager: Any = worker_manager._adapter_manager
        self.resident = len(adapters) < self._manager.lora_slots
        self._announced: Counter[int] = Counter()
        models = (worker_manager._load_adapter(adapter) for adapter in adapters)
        first = next(models, LoRAModel(zero, 1, {}))
        self._add(_zero_like(first, zero))
        if adapters:
            self._add(first)
        for model in models:
            self._add(model)

    def _add(self, model: LoRAModel) -> None:
        self._manager.add_adapter(model)
        if self.resident:
            self._manager.activate_adapter(model.id)
            model.loras.clear()  # from now on only the slot is read

    def prepare(self, adapters: Sequence[int]) -> None:
        """Load the adapters of a coming step's rows, as many as there are slots."""
        if self.resident:
            return
        self._announced.clear()
        for adapter in adapters[: self._manager.lora_slots]:
            self._load(adapter)
            self._announced[adapter] += 1

    def bring(self, adapters: Sequence[int]) -> None:
        """Make the slots hold the adapters of a step's rows. At most as many are distinct as there are slots."""
        if self.resident:
            return
        missing = []
        for adapter in adapters:
            if self._announced[adapter] > 0:
                self._announced[adapter] -= 1
                self._manager._active_adapters.touch(adapter)  # the loads below replace other adapters
            else:
                missing.append(adapter)
        for adapter in missing:
            self._load(adapter)

    def _load(self, adapter: int) -> None:
        self._manager.deactivate_adapter(adapter)
        self._manager.activate_adapter(adapter)


def _zero_like(model: LoRAModel, lora_id: int) -> LoRAModel:
    """An adapter of the same shapes with zero weights, which takes the same time to load."""
    zero = model.clone(lora_id)
    zero.loras = {
        name: LoRALayerWeights(
            name, weights.rank, weights.lora_alpha, torch.zeros_like(weights.lora_a), torch.zeros_like(weights.lora_b)
        )
        for name, weights in model.loras.items()
    }
    return zero
