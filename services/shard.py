"""Implements the Ray actor around one engine: it owns weights and caches, and returns the rows that callers use."""

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
    """Reports the state of a shard.

    Attributes:
        resident_bytes: the memory of its process, the model included.
        busy_s: the duration of its engine's current call so far; 0 when it is idle.
        failure: the type of the error with which its engine failed; None while the engine works.
    """

    adapters: tuple[str, ...]
    vocabulary: int
    context_length: int
    resident_bytes: int
    process: int
    busy_s: float
    failure: str | None

    def trouble(self, stalled_s: float) -> str | None:
        """Returns why this shard must be replaced: its engine failed or stalled. Returns None for a healthy shard."""
        if self.failure is not None:
            return f"its engine failed with {self.failure}"
        return f"its engine made no progress for {self.busy_s:.0f} s" if self.busy_s > stalled_s else None


class Shard:
    """Serves one engine. Calls carry the whole context, so a restarted shard needs no state of its predecessor."""

    def __init__(self, settings: EngineSettings) -> None:
        self._engine = create(settings)
        self._began: float | None = None
        self._failure: str | None = None

    def next_token(
        self,
        requests: Sequence[Request],
        coming: Sequence[str] = (),
        trace: str | None = None,
        returned: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Returns rows of `Engine.next_token` as float32 [rows, vocabulary], which callers read without a copy.

        Args:
            returned: the indices of the rows to return; by default all. The engine computes all of them.
            coming: the adapters that the next calls use (`Engine.prepare`).
            trace: a W3C traceparent.

        Raises:
            ValueError: the engine refuses the requests. After any other error this shard must be replaced.
        """
        self._began = time.monotonic()
        try:
            with tracing.span("shard.next_token", trace):
                rows = self._engine.next_token(requests)
                if returned is not None and len(returned) < len(rows):
                    rows = rows[list(returned)]
                answer = rows.cpu().numpy()
                self._engine.prepare(coming)
                return answer
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


# Ray restarts a dead shard but does not repeat its calls. The coordinator does, with fewer new contexts in a step.
ShardActor = ray.remote(max_restarts=-1, max_task_retries=0, concurrency_groups={"status": 1})(Shard)
