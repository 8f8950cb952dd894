"""Adds reader rows to vLLM's GPU worker. vLLM imports the worker by name (`worker_cls`)."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from privmix.engine import lora_on_gpu
from privmix.engine.lora_tiles import MAX_RANK
from privmix.engine.reader_rows import ReaderRows, ReaderWorker
from privmix.engine.step_graph import SIZES, StepGraphs, shapes

REDUCED_ARRAYS = 10
"""How many arrays of 4 bytes for each sequence and token the exponential mechanism allocates beside a step's rows."""


class GPUReaderModelRunner(ReaderRows, GPUModelRunner):  # type: ignore[misc]
    """Adds reader rows to vLLM's GPU model runner."""

    def load_adapters(self, adapters: Sequence[LoRARequest], zero: int, rank: int, targets: Sequence[str]) -> None:
        wrapper = self.reader_adapters
        if isinstance(wrapper, lora_on_gpu.TilePunicaWrapper):
            manager = self.lora_manager._adapter_manager
            wrapper.load(manager.modules, manager.packed_modules, set(targets))
        super().load_adapters(adapters, zero, rank, targets)

    def profile_run(self, *arguments: Any, **options: Any) -> None:
        """Lets vLLM, which sizes its cache by what this run leaves free, see the memory of a captured step too.

        A captured step keeps its memory while other passes run, so the two add up.
        """
        held = self._memory_of_a_step() if self.captures_steps and shapes(self.readers) else None
        super().profile_run(*arguments, **options)
        del held

    @torch.inference_mode()
    def _memory_of_a_step(self) -> torch.Tensor:
        """Returns a tensor of the size that the largest captured step and its reduction take."""
        largest = max(shapes(self.readers), key=lambda shape: shape.rows)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        StepGraphs(self, self._fork, self.reader_adapters).run(largest, profiling=True)
        torch.cuda.synchronize()
        step = torch.cuda.max_memory_allocated() - before
        reduced = REDUCED_ARRAYS * 4 * max(SIZES) * int(self.model_config.get_vocab_size())
        torch.cuda.empty_cache()
        return torch.empty(step + reduced, dtype=torch.uint8, device=self.device)


class GPUReaderWorker(ReaderWorker, Worker):  # type: ignore[misc]
    """Runs `GPUReaderModelRunner` in vLLM's GPU worker."""

    def init_device(self) -> None:
        lora, moe = self.vllm_config.lora_config, self.vllm_config.model_config.is_moe
        if lora is not None and lora.max_lora_rank <= MAX_RANK and not moe:
            lora_on_gpu.install()
        super().init_device()

    def _make_model_runner(self) -> GPUModelRunner:
        return GPUReaderModelRunner(self.vllm_config, self.device)
