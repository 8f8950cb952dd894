"""Adds reader rows to vLLM's CPU worker. vLLM imports the worker by name (`worker_cls`)."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.v1.worker.cpu_worker import CPUWorker  # must come first: it loads libraries that the next imports need

from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # isort: skip

from privmix.engine import lora_on_cpu
from privmix.engine.reader_rows import ReaderRows, ReaderWorker


class CPUReaderModelRunner(ReaderRows, CPUModelRunner):  # type: ignore[misc]
    """Adds reader rows to vLLM's CPU model runner."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        if self.lora_config is not None and self.model_config.is_moe:
            raise ValueError(
                "model: vLLM runs adapters of a mixture-of-experts model on a GPU only; use one, or train the parts "
                "with `privmix train --part-kind text`"
            )
        super().load_model(*arguments, **options)

    def load_adapters(self, adapters: Sequence[LoRARequest], zero: int, rank: int, targets: Sequence[str]) -> None:
        manager = self.lora_manager._adapter_manager
        lora_on_cpu.compact(manager.modules, manager.packed_modules, set(targets), rank)
        super().load_adapters(adapters, zero, rank, targets)


class CPUReaderWorker(ReaderWorker, CPUWorker):  # type: ignore[misc]
    """Runs `CPUReaderModelRunner` in vLLM's CPU worker."""

    def init_device(self) -> None:
        _ask_for_amx()
        torch.compiler.set_stance("force_eager")  # what vLLM compiles at its first call would hold a step for seconds
        lora_on_cpu.install()
        super().init_device()
        # vLLM has no hook for another runner here. The first runner holds neither a model nor a cache yet.
        self.model_runner = CPUReaderModelRunner(self.vllm_config, torch.device("cpu"))


def _ask_for_amx() -> None:
    """Lets this process use the tile registers of AMX, or keeps vLLM from using them.

    Linux kills a process that uses them without having asked. torch asks with its first product of bfloat16 matrices;
    the attention of vLLM 0.32.0, which chooses AMX by the processor alone, may come before. A kernel, or the sandbox
    of a container, may also refuse.
    """
    if not torch.cpu._init_amx():
        torch.cpu._is_amx_tile_supported = lambda: False
