"""Implements the Ray actor around one engine: it owns weights and caches, and returns the rows that callers use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from math import inf
from threading import get_ident
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import psutil
import ray
from numpy.typing import NDArray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from privmix.engine.engine import PUBLIC, ZERO, EngineSettings, create
from privmix.foundation.actors import concurrent
from privmix.foundation.lazily import torch
from privmix.shards.line import LineAddress, LineServer
from privmix.shards.reducer import Begun, Reducer, Reduction, on_host, pick
from privmix.shards.sessions import Asked, LostSessionError, Sessions, StepKey

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

KEPT_S = 120.0
"""How long a shard keeps the rows of a step that is never reduced, because its coordinator died or gave it up."""
KEPT_BYTES = 4 * 2**30
"""The most memory of kept rows and weights, which all coordinators share. Beyond it the oldest are dropped, and their
coordinators repeat their steps. On a GPU it is `KEPT_SHARE` of what the engine leaves free, if that is less."""
KEPT_SHARE = 0.5


class LostStepError(RuntimeError):
    """The shard does not hold the rows of this step: it has restarted, or a later step has begun."""


class AbsentPeersError(RuntimeError):
    """Shards of other groups have lost their rows of this step, failed, or do not answer.

    Attributes:
        reasons: the type of the error, by the place of the shard among those that were asked.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__(reasons)
        self.reasons = reasons


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """Reports the state of a shard.

    Attributes:
        node: the id of its Ray node.
        resident_bytes: the memory of its process, the model included.
        busy_s: the duration of its engine's current call so far; 0 when it is idle.
        failure: the type of the error with which its engine failed; None while the engine works.
    """

    adapters: tuple[str, ...]
    vocabulary: int
    context_length: int
    node: str
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
    """Holds what a step's next call needs: rows, p0 and a partial, or weights up to each token.

    Attributes:
        given: how rows are reduced.
        public: float32 [S, V], p0 of the private requests, for other groups.
    """

    held: Tensor | Begun
    since: float
    given: Reduction
    public: ObjectRef[NDArray[np.float32]] | None = None

    @property
    def nbytes(self) -> int:
        held = self.held
        tensors = (held.public, held.sums, held.charges) if isinstance(held, Begun) else (held,)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def left_free(utilization: float) -> float:
    """Returns what an engine does not take of the bytes of a GPU that this shard reserves; infinity without a GPU."""
    if not torch.cuda.is_available():
        return inf
    reserved: float = min(1.0, ray.get_runtime_context().get_assigned_resources().get("GPU", 1.0))
    return (reserved - utilization) * torch.cuda.get_device_properties(0).total_memory


def in_turn(method: Callable[Concatenate[Shard, P], T]) -> Callable[Concatenate[Shard, P], T]:
    """Runs a method in the shard's thread, whichever thread calls it."""

    @wraps(method)
    def called(shard: Shard, /, *arguments: P.args, **options: P.kwargs) -> T:
        if get_ident() == shard._ident:
            return method(shard, *arguments, **options)
        return shard._thread.submit(method, shard, *arguments, **options).result()

    return called


class Shard:
    """Serves one engine. A call tells what has changed (`Asked`); a restarted shard is told everything again.

    What is held between the calls of a step is lost with a restart, too, and then the coordinator repeats the step.
    With one group these are `weigh` and `pick`. With several, the first computes `begin` and the others `keep`. In its
    `add`, it asks the others for `partial`, and then comes `pick`. Arrays go from shard to shard as objects of Ray. To
    the coordinator go totals and charges.

    Tokens continue the contexts as they are picked. So the first call of the next step may be submitted with `pick`.

    Every call that has `asked` may raise LostSessionError: then it has computed nothing. It raises ValueError where the
    engine refuses a request. After any other error of its own than these and `LostStepError` this shard must be
    replaced. `AbsentPeersError` and an object store that is full are errors of others.
    """

    def __init__(self, settings: EngineSettings) -> None:
        # One thread loads the engine and computes for all calls, of Ray and of lines. OpenMP gives each thread a team,
        # whose members wait awake for the next operation only while all teams have no more threads than cores.
        self._thread = ThreadPoolExecutor(1)
        self._ident, self._engine = self._thread.submit(lambda: (get_ident(), create(settings))).result()
        self._reducer = Reducer()
        self._left_free = left_free(settings.gpu_memory_utilization)
        self._sessions = Sessions()
        self._kept: dict[StepKey, _Kept] = {}
        self._began: float | None = None
        self._failure: str | None = None
        self._line: LineServer | None = None

    @in_turn
    def next_token(self, asked: Asked, *, public: bool) -> NDArray[np.float32]:
        """Returns the rows of `Engine.logits` that are used, float32 [rows, vocabulary], for callers to read uncopied.

        For protocols that need raw rows (`Protocol.additive`). Shaping normalises them. The engine computes more: what
        fills the shape of a draw.

        Args:
            public: whether the public row of each request is used.
        """
        unused = {ZERO} if public else {ZERO, PUBLIC}
        with self._working():
            requests, _ = self._sessions.told(asked)
            used = [name not in unused for request in requests for name in request.adapters]
            rows = self._engine.logits(requests)
            if not all(used):
                rows = rows[np.flatnonzero(used).tolist()]
            return on_host(rows.float())

    @in_turn
    def weigh(self, asked: Asked) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Computes the sampling weights of a step, where no other group adds to them, and holds them for `pick`.

        Nothing is sampled here.

        Returns:
            int64 [requests], the sum of each request's weights; int64 [S, n], charges, None without accounts.

        Raises:
            ValueError: a public row is not a distribution.
        """
        with self._working():
            requests, given = self._sessions.told(asked)
            begun = self._reducer.begin(self._engine.logits(requests), given)
            cumulative = self._reducer.weights(begun)
            leaving = begun.leaving(cumulative[:, -1].contiguous())
            self._hold(asked.key, cumulative, given)
            return leaving

    @in_turn
    def begin(self, asked: Asked) -> NDArray[np.int64] | None:
        """Computes p0 of a step and what the parts of the first group add, and holds both for `add`.

        Returns:
            int64 [S, n], charges, None without accounts.

        Raises:
            ValueError: see `weigh`.
        """
        with self._working():
            requests, given = self._sessions.told(asked)
            begun = self._reducer.begin(self._engine.logits(requests), given)
            public, charges = begun.leaving(begun.public[: len(given.drawn)])
        stored = ray.put(public)  # an object store that is full is no failure of this shard
        self._hold(asked.key, begun, given, stored)
        return charges

    @in_turn
    def keep(self, asked: Asked) -> None:
        """Computes the rows of a step in another group, and holds them for `partial`."""
        with self._working():
            requests, given = self._sessions.told(asked)
            rows = self._engine.logits(requests)
            # A GPU's next step overwrites its rows.
            self._hold(asked.key, rows if rows.device.type == "cpu" else rows.clone(), given)

    @in_turn
    def partial(self, key: StepKey, public: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
        """Computes what the parts of another group add, from the rows that `keep` computed.

        Args:
            public: float32 [S, V], p0 of each private request, from `begin`.

        Returns:
            [S, V], the sums; int64 [S, n], their charges, None without accounts.

        Raises:
            LostStepError: the rows are not here. The step must be repeated.
        """
        with self._working():
            kept = self._take(key)
            assert isinstance(kept.held, torch.Tensor)
            return self._reducer.partial(kept.held, kept.given, public)

    @concurrent("add")
    def add(
        self, key: StepKey, peers: Sequence[ActorHandle], patience_s: float
    ) -> tuple[NDArray[np.int64], list[NDArray[np.int64] | None]]:
        """Computes the sampling weights from what all groups add, and holds them for `pick`.

        It waits for other shards in its caller's thread. Meanwhile this one computes for other callers.

        Args:
            peers: a shard of each group after the first, which has answered `keep`.
            patience_s: how long they may take.

        Returns:
            int64 [requests], the sum of each request's weights; int64 [S, n] of each peer, its charges, None without
            accounts.

        Raises:
            LostStepError: what the first group adds is not here. The step must be repeated.
            AbsentPeersError: there is no partial of some peers. The step must be repeated.
            ValueError: the groups add more than a draw can.
        """
        public = self._thread.submit(self._held, key).result().public
        answers = _answers([peer.partial.remote(key, public) for peer in peers], patience_s)
        return self._add(key, [sums for sums, _ in answers]), [charges for _, charges in answers]

    @in_turn
    def _add(self, key: StepKey, sums: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
        with self._working():
            kept = self._take(key)
            assert isinstance(kept.held, Begun)
            cumulative = self._reducer.weights(kept.held, sums)
            self._hold(key, cumulative, kept.given)
            return on_host(cumulative[:, -1].contiguous())

    @in_turn
    def pick(self, key: StepKey, points: NDArray[np.int64], sequences: Sequence[str | None]) -> NDArray[np.int64]:
        """Continues contexts by the token of each request, and returns them, int64 [requests].

        A token is a function of the weights and the point. To draw a point is to sample a token: the caller charges it
        before, whether this call answers or not.

        Args:
            points: int64 [requests], uniform below the totals (`categorical.draw`), or `NO_POINT`.
            sequences: of each request; None for one without a point.

        Raises:
            LostStepError: the weights are not here. The step must be repeated.
            ValueError: a point is not below its total.
        """
        with self._working():
            weights = self._take(key).held
            assert isinstance(weights, torch.Tensor)
            tokens = pick(points, weights)
            self._sessions.append(sequences, tokens)
            return tokens

    @in_turn
    def drop_caches(self, sequences: Sequence[str]) -> None:
        with self._working():
            for sequence in sequences:
                self._sessions.forget(sequence)
                self._engine.drop_caches(sequence)

    @concurrent("status")
    def line(self) -> LineAddress:
        """Returns where methods can be called without Ray (`Line`)."""
        if self._line is None:
            self._line = LineServer(self, self._thread, ray.util.get_node_ip_address(), waiting=("add",))
        return self._line.address

    @concurrent("status")
    def status(self) -> ShardStatus:
        began = self._began
        return ShardStatus(
            adapters=self._engine.adapters,
            vocabulary=self._engine.vocabulary,
            context_length=self._engine.context_length,
            node=ray.get_runtime_context().get_node_id(),
            resident_bytes=psutil.Process().memory_info().rss,
            process=os.getpid(),
            busy_s=0.0 if began is None else time.monotonic() - began,
            failure=self._failure,
        )

    def _hold(self, key: StepKey, held: Tensor | Begun, given: Reduction, public: ObjectRef[Any] | None = None) -> None:
        """Holds something for the next call of a step.

        Drops what is kept of the caller's earlier steps, and what is old of any caller. Then it drops the oldest of
        what is kept, but none of this step, until `KEPT_BYTES` are enough.
        """
        kept = _Kept(held, time.monotonic(), given, public)
        for old, other in list(self._kept.items()):
            if (old.caller == key.caller and old.step < key.step) or other.since < kept.since - KEPT_S:
                del self._kept[old]
        room = min(KEPT_BYTES, KEPT_SHARE * self._left_free)
        used = kept.nbytes + sum(other.nbytes for other in self._kept.values())
        for old in [old for old in self._kept if (old.caller, old.step) != (key.caller, key.step)]:
            if used > room:
                used -= self._kept.pop(old).nbytes
        self._kept[key] = kept

    def _held(self, key: StepKey) -> _Kept:
        """Returns what is held under this key."""
        if key not in self._kept:
            raise LostStepError
        return self._kept[key]

    def _take(self, key: StepKey) -> _Kept:
        """Returns what is held under this key, and holds it no longer."""
        kept = self._held(key)
        del self._kept[key]
        return kept

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Records how long the current call takes, and an error after which this shard must be replaced."""
        self._began = time.monotonic()
        try:
            yield
        except (ValueError, LostSessionError, LostStepError):
            raise
        except Exception as error:
            self._failure = type(error).__name__
            raise
        finally:
            self._began = None


def _answers(calls: list[ObjectRef[Any]], patience_s: float) -> list[Any]:
    """Returns what peers answer to a call each.

    Raises:
        AbsentPeersError: some fail, or do not answer in time.
        ValueError: a peer raises it.
    """
    _, late = ray.wait(calls, num_returns=len(calls), timeout=patience_s)
    for call in late:
        ray.cancel(call)
    answers, absent = list[Any](), dict[int, str]()
    for place, call in enumerate(calls):
        try:
            answers.append(ray.get(call, timeout=0))
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, ValueError):
                raise cause from None
            absent[place] = type(cause).__name__
    if absent:
        raise AbsentPeersError(absent)
    return answers


CONCURRENCY = {"status": 1, "add": 8}
"""The methods that run beside others, and how many calls of each: `add` waits for other shards."""
# Ray restarts a dead shard but does not repeat its calls. The coordinator does, with fewer new contexts in a step.
ShardActor = ray.remote(max_restarts=-1, max_task_retries=0, concurrency_groups=CONCURRENCY)(Shard)
