"""Adds reader rows to vLLM's GPU worker. vLLM imports the worker by name (`worker_cls`)."""

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from services.engine.reader_rows import ReaderRows, ReaderWorker


class GPUReaderModelRunner(ReaderRows, GPUModelRunner):  # type: ignore[misc]
    """A GPU model runner whose batches may have reader rows."""


class GPUReaderWorker(ReaderWorker, Worker):  # type: ignore[misc]
    """A GPU worker around `GPUReaderModelRunner`."""

    def _make_model_runner(self) -> GPUModelRunner:
        return GPUReaderModelRunner(self.vllm_config, self.device)
