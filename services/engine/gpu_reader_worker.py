"""Adds reader rows to vLLM's GPU worker. vLLM imports the worker by name (`worker_cls`)."""

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from services.engine.reader_rows import ReaderRows, ReaderWorker


class GPUReaderModelRunner(ReaderRows, GPUModelRunner):  # type: ignore[misc]
    """Adds reader rows to vLLM's GPU model runner."""


class GPUReaderWorker(ReaderWorker, Worker):  # type: ignore[misc]
    """Runs `GPUReaderModelRunner` in vLLM's GPU worker."""

    def _make_model_runner(self) -> GPUModelRunner:
        return GPUReaderModelRunner(self.vllm_config, self.device)
