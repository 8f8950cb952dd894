"""Adds reader rows to vLLM's GPU worker. vLLM imports the worker by name (`worker_cls`)."""

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from services.engine.adapter_slots import launched_for_rows
from services.engine.reader_rows import ReaderBatch, ReaderRows, ReaderWorker


class GPUReaderModelRunner(ReaderRows, GPUModelRunner):  # type: ignore[misc]
    """Adds reader rows to vLLM's GPU model runner."""

    def _run_readers(self, batch: ReaderBatch, fork: torch.Tensor) -> torch.Tensor:
        if self.slots is None:
            return super()._run_readers(batch, fork)
        (wrapper,) = self.lora_manager._adapter_manager.punica_wrapper_mapping.values()
        with launched_for_rows(wrapper.token_mapping_meta, batch.readers):
            return super()._run_readers(batch, fork)


class GPUReaderWorker(ReaderWorker, Worker):  # type: ignore[misc]
    """Runs `GPUReaderModelRunner` in vLLM's GPU worker."""

    def _make_model_runner(self) -> GPUModelRunner:
        return GPUReaderModelRunner(self.vllm_config, self.device)
