"""The shards of one part group: a sequence keeps to one of them, and moves to another one where it does not answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from services.coordinator.messages import Unavailable
from services.engine.engine import Request
from services.shard import ShardStatus

STATUS_S = 3.0
AVOIDED_S = 30.0
"""How long a copy that was slow or failed is used last."""


class Copies:
    """Actors that hold the same models. Which of them a sequence uses depends on the sequence alone.

    Args:
        names: of the actors.
        actor: finds a living actor by its name, or raises ValueError.
        patience_s: how long a copy may take before the next one is called, too.
    """

    def __init__(self, names: Sequence[str], actor: Callable[[str], ActorHandle], patience_s: float) -> None:
        self._names = tuple(names)
        self._actor = actor
        self._patience_s = patience_s
        self._handles: dict[str, ActorHandle] = {}
        self._avoided = dict.fromkeys(range(len(self._names)), 0.0)

    def order(self, number: int) -> tuple[int, ...]:
        """Returns the copies in the order in which a sequence of this number uses them."""
        order = [(number + step) % len(self._names) for step in range(len(self._names))]
        now = time.monotonic()
        return tuple(sorted(order, key=lambda copy: self._avoided[copy] > now))

    async def next_token(
        self, order: Sequence[int], requests: Sequence[Request], coming: Sequence[str], trace: str | None
    ) -> np.ndarray:
        """Returns the rows, float32 [rows, V], from the first copy that answers; see `Shard.next_token`.

        Raises:
            Unavailable: no copy answers; names the last one.
            ValueError: the engine refuses the requests.
        """
        calls: list[asyncio.Task[np.ndarray]] = []
        try:
            for position, copy in enumerate(order):
                call = self._call(self._names[copy], lambda shard: shard.next_token.remote(requests, coming, trace))
                calls.append(asyncio.create_task(call))
                last = position == len(order) - 1
                answered = await _first(calls, None if last else self._patience_s)
                if answered is not None:
                    return answered
                self._avoided[copy] = time.monotonic() + AVOIDED_S
            return calls[-1].result()  # raises what the last one raised
        finally:
            for call_ in calls:
                call_.cancel()

    def release(self, sequences: Sequence[str]) -> None:
        """Drop the caches of sequences. A copy that does not answer is left out: it has lost them."""
        for shard in self._handles.values():
            shard.release.remote(sequences)

    async def status(self) -> list[ShardStatus | Unavailable]:
        """Returns the status of each copy, or why there is none."""
        return await asyncio.gather(*(self._status(name) for name in self._names))

    async def _status(self, name: str) -> ShardStatus | Unavailable:
        try:
            async with asyncio.timeout(STATUS_S):
                status: ShardStatus = await self._call(name, lambda shard: shard.status.remote())
        except Unavailable as error:
            return error
        except TimeoutError:
            return Unavailable(f"the actor {name!r} does not answer within {STATUS_S:g} s")
        return status

    async def _call(self, name: str, method: Callable[[ActorHandle], Awaitable[Any]]) -> Any:
        """Call one copy. A call that is cancelled here is cancelled there, so that Ray does not repeat it.

        Raises:
            Unavailable, ValueError: see `next_token`.
        """
        try:
            if name not in self._handles:
                self._handles[name] = await asyncio.to_thread(self._actor, name)
        except ValueError:
            raise Unavailable(f"the actor {name!r} is not alive") from None
        call: ObjectRef[Any] = method(self._handles[name])
        try:
            return await call
        except RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise error.cause from None
            raise Unavailable(f"the actor {name!r} failed: {type(error.cause).__name__}") from error
        except RayError as error:
            self._handles.pop(name, None)  # the fleet may start another actor under this name
            raise Unavailable(f"the actor {name!r} does not answer: {type(error).__name__}") from error
        except asyncio.CancelledError:
            ray.cancel(call)
            raise


async def _first(calls: Sequence[asyncio.Task[np.ndarray]], timeout_s: float | None) -> np.ndarray | None:
    """Returns the first answer within the time; None when there is none, or every call has failed."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    waiting = set(calls)
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for call in done:
            with suppress(Unavailable):
                return call.result()
        if not done:
            return None
    return None
