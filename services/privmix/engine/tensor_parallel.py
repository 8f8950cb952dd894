"""Splits one vLLM model over several devices of a machine (tensor parallelism). Each device has a process, its rank.

Rank 0 is the process of the engine: the rows stay beside the reducer, and one scheduler decides for all ranks. The
other ranks, the followers, have only a worker of vLLM. They receive every call of rank 0's worker and run it at the
same time, because a collective operation returns when all ranks have reached it.

If rank 0 ends, even by SIGKILL, the followers read the end of their pipes and end. If a follower ends, the next call
raises `RankLostError`. Nothing can interrupt a call that already waits for it in a collective operation, so then the
process of rank 0 ends too.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_file_store_init_method
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

GRACE_S = 20.0
"""How long a call may continue after a follower has ended. Then the process ends."""
END_S = 10.0
"""How long a follower may take to end. Then it is killed."""

logger = logging.getLogger(__name__)


class RankLostError(RuntimeError):
    """A follower has ended. The engine should be replaced."""


class Call(NamedTuple):
    """Names a method of vLLM's worker and its arguments.

    Attributes:
        returns: whether rank 0 needs the result.
    """

    method: str | Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    returns: bool


class TensorParallelExecutor(UniProcExecutor):  # type: ignore[misc]
    """Runs the worker of rank 0 in this process, and those of the other ranks in followers."""

    def _init_executor(self) -> None:
        if torch.distributed.is_initialized():
            raise RuntimeError("tensor parallelism needs a process in which no other engine is open")
        self._rendezvous = get_file_store_init_method()
        self._ending = False
        self._in_call = threading.Lock()
        self._followers = [
            Follower(self.vllm_config, self._rendezvous, rank)
            for rank in range(1, self.parallel_config.tensor_parallel_size)
        ]
        threading.Thread(target=self._watch, daemon=True, name="watch-followers").start()
        with self._calling():
            super()._init_executor()

    def _distributed_args(self) -> tuple[str, int, int]:
        return self._rendezvous, 0, 0

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Calls a method of every rank's worker; returns the results by rank, or only that of rank 0.

        With `non_block` it waits too, and returns a future: nothing else runs in the meantime.

        Raises:
            RankLostError: a follower has ended. After any error, all further calls raise it.
        """
        with self._calling():
            for follower in self._followers:
                follower.send(Call(method, args, kwargs or {}, returns=not single_value))
            own = super().collective_rpc(method, timeout, args, kwargs, single_value=True)
            others = [follower.receive() for follower in self._followers]
        results = own if single_value else [own, *others]
        if not non_block:
            return results
        future: Future[Any] = Future()
        future.set_result(results)
        return future

    def shutdown(self) -> None:
        self._ending = True
        for follower in self._followers:
            follower.ask_to_end()
        super().shutdown()
        cleanup_dist_env_and_memory()  # at the same time as the followers: NCCL's communicators wait for each other
        for follower in self._followers:
            follower.end(END_S)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Ends the followers after an error in the block: the ranks may have stopped at different points of a call."""
        with self._in_call:
            try:
                yield
            except BaseException:
                self._ending = True
                for follower in self._followers:
                    follower.end(0.0)
                raise

    def _watch(self) -> None:
        """Ends this process if a follower has ended and the current call does not return."""
        wait([follower.sentinel for follower in self._followers])
        if self._ending:
            return
        if self._in_call.acquire(timeout=GRACE_S):
            self._in_call.release()
        elif not self._ending:
            logger.critical(
                "a process of the tensor-parallel engine has ended; the engine waits for it, and so ends too"
            )
            os._exit(1)


class Follower:
    """Runs the worker of another rank in a process, as rank 0 sees it."""

    def __init__(self, config: VllmConfig, rendezvous: str, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._rank = rank
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_follow, args=(theirs, config, rendezvous, rank), name=f"tensor-parallel-{rank}", daemon=True
        )
        self._process.start()
        theirs.close()  # so that the pipe ends with the follower

    @property
    def sentinel(self) -> int:
        """A handle that becomes ready when the process ends."""
        return self._process.sentinel

    def send(self, call: Call) -> None:
        try:
            self._pipe.send(call)
        except OSError as error:
            raise self._lost() from error

    def receive(self) -> Any:
        """Returns the result of the last call; None unless the call returns it."""
        try:
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error

    def ask_to_end(self) -> None:
        with suppress(OSError):
            self._pipe.send(None)

    def end(self, patience_s: float) -> None:
        """Waits for the end of the process, and kills it after `patience_s`."""
        self._process.join(patience_s)
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _lost(self) -> RankLostError:
        return RankLostError(
            f"rank {self._rank} of the tensor-parallel engine has ended with code {self._process.exitcode}; its log "
            "has the reason"
        )


def _follow(pipe: Connection, config: VllmConfig, rendezvous: str, rank: int) -> None:
    """Runs the calls that come through the pipe. An error ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to rank 0 as well, which decides
    calls: SimpleQueue[Call | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, calls), daemon=True).start()
    worker = _start_worker(config, rendezvous, rank)
    while call := calls.get():
        result = run_method(worker, call.method, call.arguments, call.options)
        pipe.send(result if call.returns else None)
    worker.shutdown()
    cleanup_dist_env_and_memory()


def _receive(pipe: Connection, calls: "SimpleQueue[Call | None]") -> None:
    """Puts the calls into the queue. Ends the process with the pipe, in whatever operation it waits for rank 0."""
    try:
        while True:
            calls.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)


def _start_worker(config: VllmConfig, rendezvous: str, rank: int) -> WorkerWrapperBase:
    """Does what `UniProcExecutor` does for rank 0."""
    worker = WorkerWrapperBase(global_rank=rank)
    worker.init_worker(
        [
            {
                "vllm_config": config,
                "local_rank": rank,
                "rank": rank,
                "distributed_init_method": rendezvous,
                "is_driver_worker": False,
                "shared_worker_lock": None,
            }
        ]
    )
    worker.init_device()
    worker.load_model()
    current_platform.update_block_size_for_backend(config)
    return worker
