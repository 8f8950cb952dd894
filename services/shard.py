"""A Ray actor around one engine: it owns weights and caches, and answers with whole rows."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import ray

from services import tracing
from services.engine.engine import EngineSettings, Request, create


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """What a shard says of itself; `resident_bytes` is the memory of its process, the model included."""

    adapters: tuple[str, ...]
    vocabulary: int
    context_length: int
    resident_bytes: int
    process: int


class Shard:
    """Calls carry the whole context, so a call that Ray repeats on a restarted shard needs nothing from the old one."""

    def __init__(self, settings: EngineSettings) -> None:
        self._engine = create(settings)

    def next_token(self, requests: Sequence[Request], trace: str | None = None) -> np.ndarray:
        """`Engine.next_token` as float32 [rows, vocabulary] in the object store, read by the caller without a copy."""
        with tracing.span("shard.next_token", trace):
            return self._engine.next_token(requests).cpu().numpy()

    def release(self, sequences: Sequence[str]) -> None:
        for sequence in sequences:
            self._engine.release(sequence)

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def status(self) -> ShardStatus:
        return ShardStatus(
            adapters=self._engine.adapters,
            vocabulary=self._engine.vocabulary,
            context_length=self._engine.context_length,
            resident_bytes=psutil.Process().memory_info().rss,
            process=os.getpid(),
        )


# Ray restarts a shard that died, and repeats on it what was asked of the old one.
ShardActor = ray.remote(max_restarts=-1, max_task_retries=-1, concurrency_groups={"status": 1})(Shard)
