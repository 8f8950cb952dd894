"""Implements the Ray actor around one engine: it owns weights and caches, and returns the rows that callers use."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import psutil
import ray
from numpy.typing import NDArray

from privmix.engine.engine import ComingRow, EngineSettings, Request, create
from privmix.foundation.actors import concurrent
from privmix.foundation.lazily import torch
from privmix.shards.reducer import Reduced, Reducer, Reduction, Weighed, on_host, pick

if TYPE_CHECKING:
    from torch import Tensor

KEPT_S = 120.0
"""How long a shard keeps the rows of a step that is never reduced, because its coordinator died or gave it up."""
KEPT_BYTES = 4 * 2**30
"""The most memory of kept rows and weights, which all coordinators share. Beyond it the oldest are dropped, and their
coordinators repeat their steps. On a GPU it is `KEPT_SHARE` of what the engine leaves free, if that is less."""
KEPT_SHARE = 0.5


class LostStepError(RuntimeError):
    """The shard does not hold the rows of this step: it has restarted, or a later step has begun."""


@dataclass(frozen=True, slots=True)
class StepKey:
    """Names a call of `Shard.keep` or `Shard.weigh`.

    Attributes:
        caller: the coordinator.
        step: the number of the caller's attempt at a step. A repeated step has a new number.
        batch: the number of the call within the attempt.
    """

    caller: str
    step: int
    batch: int


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


@dataclass(frozen=True, slots=True)
class _Kept:
    """Holds rows of a step, or the weights that came of them, [rows, V], and the rows that come after it."""

    rows: Tensor
    since: float
    coming: Sequence[ComingRow]


def left_free(utilization: float) -> float:
    """Returns the bytes of a GPU that an engine with this utilization does not take; infinity without a GPU."""
    if not torch.cuda.is_available():
        return inf
    return (1 - utilization) * torch.cuda.get_device_properties(0).total_memory


class Shard:
    """Serves one engine. Calls carry the whole context, so a restarted shard needs no state of its predecessor.

    What is kept between `keep` and `reduce_kept`, or `weigh` and `pick`, is the only exception: where it is lost, the
    coordinator repeats the step.
    """

    def __init__(self, settings: EngineSettings) -> None:
        # Ray calls the methods in another thread. OpenMP gives each thread a team of its own, whose members wait awake
        # for the next operation only while all teams together have no more threads than there are cores. So the team
        # of the thread that loads the engine must end with it.
        with ThreadPoolExecutor(1) as loading:
            self._engine = loading.submit(create, settings).result()
        self._reducer = Reducer()
        self._left_free = left_free(settings.gpu_memory_utilization)
        self._kept: dict[StepKey, _Kept] = {}
        self._began: float | None = None
        self._failure: str | None = None

    def next_token(
        self,
        requests: Sequence[Request],
        coming: Sequence[ComingRow] = (),
        returned: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Returns rows of `Engine.logits` as float32 [rows, vocabulary], which callers read without a copy.

        For protocols that need raw rows (`Protocol.additive`). Shaping normalises them.

        Args:
            returned: the indices of the rows to return; by default all. The engine computes all of them.
            coming: the rows of the next calls. Their adapters are prepared after the answer has left.

        Raises:
            ValueError: the engine refuses the requests. After any other error this shard must be replaced.
        """
        with self._working():
            rows = self._engine.logits(requests)
            if returned is not None and len(returned) < len(rows):
                rows = rows[list(returned)]
            answer = on_host(rows.float())
        self._prepare_later(coming)
        return answer

    def reduce(
        self,
        requests: Sequence[Request],
        reduction: Reduction,
        coming: Sequence[ComingRow] = (),
    ) -> Reduced:
        """Computes the rows of a step and returns their p0 and their partials; see `next_token` for the rest."""
        with self._working():
            reduced = self._reducer.reduce(self._engine.logits(requests), reduction)
        self._prepare_later(coming)
        return reduced

    def keep(self, key: StepKey, requests: Sequence[Request], coming: Sequence[ComingRow] = ()) -> None:
        """Computes the rows of a step and keeps them on the device for `reduce_kept`; see `next_token` for the rest.

        Drops what the same caller kept for its earlier steps.
        """
        with self._working():
            self._forget_before(key)
            rows = self._engine.logits(requests)
            self._make_room(rows.nbytes, key)
            # A GPU's next step overwrites its rows.
            kept = rows if rows.device.type == "cpu" else rows.clone()
            self._kept[key] = _Kept(kept, time.monotonic(), coming)

    def _make_room(self, size: int, key: StepKey) -> None:
        """Drops the oldest of what is kept, but none of this step, until this size fits into `KEPT_BYTES`."""
        room = min(KEPT_BYTES, KEPT_SHARE * self._left_free)
        others = [old for old in self._kept if (old.caller, old.step) != (key.caller, key.step)]
        used = size + sum(kept.rows.nbytes for kept in self._kept.values())
        for old in others:
            if used <= room:
                return
            used -= self._kept.pop(old).rows.nbytes

    def reduce_kept(self, key: StepKey, reduction: Reduction, public: NDArray[np.float32]) -> Reduced:
        """Returns the partials of the rows that `keep` computed, with p0 from another shard.

        Args:
            public: float32 [S, V], p0 of each private request.

        Raises:
            LostStepError: the rows are not here. The step must be repeated.
        """
        if key not in self._kept:
            raise LostStepError
        with self._working():
            kept = self._kept.pop(key)
            reduced = self._reducer.reduce(kept.rows, reduction, public)
        self._prepare_later(kept.coming)
        return reduced

    def weigh(
        self,
        key: StepKey,
        requests: Sequence[Request],
        reduction: Reduction,
        coming: Sequence[ComingRow] = (),
    ) -> Weighed:
        """Computes the sampling weights of a step, keeps them on the device for `pick`, and returns their totals.

        For an ensemble of one group, whose shard has the rows of every draw. Nothing is sampled here; see `keep` and
        `next_token` for the rest.
        """
        with self._working():
            self._forget_before(key)
            weighed, cumulative = self._reducer.weigh(self._engine.logits(requests), reduction)
            self._make_room(cumulative.nbytes, key)
            self._kept[key] = _Kept(cumulative, time.monotonic(), ())
        self._prepare_later(coming)
        return weighed

    def pick(self, key: StepKey, points: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the token of each request of `weigh`, int64 [requests]: a function of its weights and its point.

        To draw a point is to sample a token: the caller charges it before, whether this call answers or not.

        Args:
            points: int64 [requests], uniform below the totals (`categorical.draw`), or `NO_POINT`.

        Raises:
            LostStepError: the weights are not here. The step must be repeated.
            ValueError: a point is not below its total.
        """
        if key not in self._kept:
            raise LostStepError
        with self._working():
            return pick(points, self._kept.pop(key).rows)

    def prepare(self, rows: Sequence[ComingRow]) -> None:
        """Loads the adapters of the next calls' rows (`Engine.prepare`)."""
        with self._working():
            self._engine.prepare(rows)

    def drop_caches(self, sequences: Sequence[str]) -> None:
        for sequence in sequences:
            self._engine.drop_caches(sequence)

    @concurrent("status")
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

    def _prepare_later(self, rows: Sequence[ComingRow]) -> None:
        """Calls `prepare` after the current call: an actor runs its calls one after another.

        Whether it does depends on the number of adapters and of slots alone, so time tells nothing of a draw.
        """
        if rows and not self._engine.resident:
            ray.get_runtime_context().current_actor.prepare.remote(rows)

    def _forget_before(self, key: StepKey) -> None:
        """Drops what is kept of the caller's earlier steps, and what is old of any caller."""
        now = time.monotonic()
        for old, kept in list(self._kept.items()):
            if (old.caller == key.caller and old.step < key.step) or kept.since < now - KEPT_S:
                del self._kept[old]

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Records how long the current call takes, and an error after which this shard must be replaced."""
        self._began = time.monotonic()
        try:
            yield
        except ValueError:
            raise
        except Exception as error:
            self._failure = type(error).__name__
            raise
        finally:
            self._began = None


# Ray restarts a dead shard but does not repeat its calls. The coordinator does, with fewer new contexts in a step.
ShardActor = ray.remote(max_restarts=-1, max_task_retries=0, concurrency_groups={"status": 1})(Shard)
