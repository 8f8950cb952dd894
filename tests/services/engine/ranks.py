"""Workers and a program for the tests of tensor parallelism: the processes of its ranks import them by name.

`python -m tests.services.engine.ranks MODEL WORKER` runs an engine over two ranks. It prints the process id of the
second, then computes a row for each line of tokens that it reads, and prints "answered" or the error. At the end of its
input it closes the engine and prints "closed".
"""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override
from vllm.distributed.parallel_state import get_tp_group

from privmix.engine import vllm_engine
from privmix.engine.cpu_reader_worker import CPUReaderModelRunner, CPUReaderWorker
from privmix.engine.engine import PUBLIC, EngineSettings, Request
from tests.services.engine.vllm_starts import start_with


class ApartRunner(CPUReaderModelRunner):
    """Runs the readers apart from the public tokens, as where vLLM compiles the model."""

    _runs_together = False


class ApartWorker(CPUReaderWorker):
    def init_device(self) -> None:
        super().init_device()
        self.model_runner = ApartRunner(self.vllm_config, torch.device("cpu"))


class WaitingWorker(CPUReaderWorker):
    """Lets rank 0 wait in a collective operation that the other rank never reaches."""

    waiting_rank = 0

    @override
    def on_runner(self, method: str, *arguments: Any) -> Any:
        if method != "begin_step":
            return super().on_runner(method, *arguments)
        if self.rank == self.waiting_rank:
            print("waits", flush=True)
            return get_tp_group().all_reduce(torch.zeros(1))
        return threading.Event().wait()


class WaitingFollower(WaitingWorker):
    waiting_rank = 1


def named(worker: type[CPUReaderWorker]) -> str:
    """Returns the name by which vLLM finds a worker."""
    return f"{__name__}.{worker.__qualname__}"


def main(model: str, worker: str) -> None:
    start_with(pytest.MonkeyPatch(), worker_cls=named(getattr(sys.modules[__name__], worker)))
    settings = EngineSettings(Path(model), "vllm", "float32", 64, cache_gib=1, tensor_parallel_size=2)
    engine = vllm_engine.VllmEngine(settings)
    follower = engine._llm.engine_core.engine_core.model_executor._followers[0]
    print(follower._process.pid, flush=True)
    for line in sys.stdin:
        try:
            engine.next_token([Request("sequence", tuple(map(int, line.split())), (PUBLIC,))])
        except RuntimeError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        else:
            print("answered", flush=True)
    engine.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
