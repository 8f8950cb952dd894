"""A Ray actor around one engine: it owns weights and caches, and answers with whole rows."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import ray

from services import tracing
from services.engine.engine import EngineSettings, Request, create


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """The state of a shard.

    Attributes:
        resident_bytes: memory of its process, the model included.
        busy_s: for how long its engine has worked on the present call; 0 when it is idle.
        failure: the type of the error with which its engine failed; None while it works.
    """

    adapters: tuple[str, ...]
    vocabulary: int
    context_length: int
    resident_bytes: int
    process: int
    busy_s: float
    failure: str | None

    def trouble(self, stalled_s: float) -> str | None:
        """Returns why this shard must be replaced, if it must: its engine failed, or made no progress for too long."""
        if self.failure is not None:
            return f"its engine failed with {self.failure}"
        return f"its engine made no progress for {self.busy_s:.0f} s" if self.busy_s > stalled_s else None


class Shard:
    """Calls carry the whole context, so a call that is repeated on a restarted shard needs nothing from the old one."""

    def __init__(self, settings: EngineSettings) -> None:
        self._engine = create(settings)
        self._began: float | None = None
        self._failure: str | None = None

    def next_token(
        self, requests: Sequence[Request], coming: Sequence[str] = (), trace: str | None = None
    ) -> np.ndarray:
        """`Engine.next_token` as float32 [rows, vocabulary] in the object store, read by the caller without a copy.

        Args:
            coming: the adapters that the next calls ask for (`Engine.prepare`).
            trace: a W3C traceparent.

        Raises:
            ValueError: the engine refuses the requests. After any other error this shard must be replaced.
        """
        self._began = time.monotonic()
        try:
            with tracing.span("shard.next_token", trace):
                rows = self._engine.next_token(requests).cpu().numpy()
                self._engine.prepare(coming)
                return rows
        except ValueError:
            raise
        except Exception as error:
            self._failure = type(error).__name__
            raise
        finally:
            self._began = None

    def release(self, sequences: Sequence[str]) -> None:
        for sequence in sequences:
            self._engine.release(sequence)

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def status(self) -> ShardStatus:
        began = self._began
        return ShardStatus(
            adapters=self._engine.adapters,
            vocabulary=self._engine.vocabulary,
            context_length=self._engine.context_length,
            resident_bytes=psutil.Process().memory_info().rss,
            process=os.getpid(),
            busy_s=0.0 if began is None else time.monotonic() - began,
            failure=self._failure,
        )


# Ray restarts a shard that died. It does not repeat its calls: the coordinator does, with fewer new contexts at a time.
ShardActor = ray.remote(max_restarts=-1, max_task_retries=0, concurrency_groups={"status": 1})(Shard)
