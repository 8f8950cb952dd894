"""Calls the copies of one part group: each sequence prefers one copy and moves on when that copy does not answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError

from privmix.coordinator.recovery import cause_of
from privmix.foundation.errors import CoordinatorUnavailable
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.shards.line import Line
from privmix.shards.sessions import Asked, LostSessionError
from privmix.shards.shard import AbsentPeersError, ShardStatus


class Told:
    """Holds what one copy was told by this process.

    Attributes:
        contexts: how many tokens of each sequence, with those that it has picked, and its options.
        terms: whether it was told the terms (`Terms`).
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Assumes that the copy knows nothing."""
        self.contexts: dict[str, tuple[int, SamplingOptions]] = {}
        self.terms = False

    def note_picked(self, sequences: Sequence[str | None]) -> None:
        """Notes that the copy picks a token of each of these sequences."""
        for sequence in sequences:
            if sequence in self.contexts:
                length, options = self.contexts[sequence]
                self.contexts[sequence] = length + 1, options


Tell = Callable[[Told], Asked]
"""Makes what a copy is asked from what it was told, and notes what it is told now."""

ShardCall = Callable[[ActorHandle], Awaitable[Any]]
"""Calls a method of `Shard`."""

STATUS_S = 3.0
AVOIDED_S = 30.0
"""How long a slow or failed copy stays last in the order."""


class ShardCopies:
    """Calls the actors that serve the same models. A sequence's preferred copy depends only on the sequence's id.

    Args:
        names: the Ray names of the actors.
        actor: returns the living actor with a name, or raises ValueError.
        patience_s: how long a copy may take before the next copy is called too.
        lines: whether calls take a `Line`.
    """

    def __init__(
        self, names: Sequence[str], actor: Callable[[str], ActorHandle], patience_s: float, *, lines: bool = False
    ) -> None:
        self._names = tuple(names)
        self._actor = actor
        self._patience_s = patience_s
        self._handles: dict[str, ActorHandle] = {}
        self._lines: dict[str, Line] | None = {} if lines else None
        self._connecting = {name: asyncio.Lock() for name in self._names}
        self._told = {name: Told() for name in self._names}
        self._avoided = dict.fromkeys(range(len(self._names)), 0.0)

    def order(self, sequence: str, picked: int = 0) -> tuple[int, ...]:
        """Returns the indices of the copies in the order in which a sequence calls them.

        Args:
            picked: the length of its context with a token that only those who are told of it know; 0 without one.
        """
        if len(self._names) == 1:
            return (0,)
        number, now = crc32(sequence.encode()), time.monotonic()

        def rank(copy: int) -> tuple[bool, bool, int]:
            told, _ = self._told[self._names[copy]].contexts.get(sequence, (0, None))
            return told < picked, self._avoided[copy] > now, (copy - number) % len(self._names)

        return tuple(sorted(range(len(self._names)), key=rank))

    async def first(self, order: Sequence[int], method: str, tell: Tell, **options: Any) -> tuple[int, Any]:
        """Returns the first copy that answers, and its answer.

        Args:
            method: of `Shard`, one that has `asked`.

        Raises:
            CoordinatorUnavailable: no copy answers; names the last one.
            ValueError: the engine refuses the requests.
        """
        if len(order) == 1:
            return order[0], await self._ask(self._names[order[0]], method, tell, options)
        calls: list[asyncio.Task[Any]] = []
        try:
            for position, copy in enumerate(order):
                calls.append(asyncio.create_task(self._ask(self._names[copy], method, tell, options)))
                last = position == len(order) - 1
                answered = await _first(calls, None if last else self._patience_s)
                if answered is not None:
                    return order[answered], calls[answered].result()
                self.avoid(copy)
            return order[-1], calls[-1].result()  # raises the last call's error
        finally:
            for call_ in calls:
                call_.cancel()

    async def actor(self, copy: int) -> ActorHandle:
        """Returns a copy, for another group's shard to call.

        Raises:
            CoordinatorUnavailable: it is not alive.
        """
        return await self._handle(self._names[copy])

    @property
    def patience_s(self) -> float | None:
        """How long one may take before another is called; None if there is no other."""
        return self._patience_s if len(self._names) > 1 else None

    def avoid(self, copy: int) -> None:
        """Puts a copy last in the order for some time."""
        self._avoided[copy] = time.monotonic() + AVOIDED_S

    async def same(self, copy: int, method: ShardCall) -> Any:
        """Calls the copy that has answered, which holds the rows of this step, and waits for as long as it is alive.

        A copy answers one call after another, so it may first ingest another coordinator's long prompts.

        Raises:
            CoordinatorUnavailable: it does not answer; the step must be repeated, and another copy is preferred then.
            AbsentPeersError, ValueError: see `_call`.
        """
        try:
            return await self._call(self._names[copy], method)
        except CoordinatorUnavailable:
            self.avoid(copy)
            raise

    def told(self, copy: int) -> Told:
        """Returns what this copy was told."""
        return self._told[self._names[copy]]

    def forget(self) -> None:
        """Assumes that no copy knows anything."""
        for told in self._told.values():
            told.forget()

    def drop_caches(self, sequences: Sequence[str]) -> None:
        """Drops the caches of sequences. Skips copies that were never called or are lost: they hold no caches."""
        for shard in {**self._handles, **(self._lines or {})}.values():
            shard.drop_caches.remote(sequences)
        for told in self._told.values():
            for sequence in sequences:
                told.contexts.pop(sequence, None)

    def close(self) -> None:
        """Ends the lines."""
        for line in (self._lines or {}).values():
            line.close()

    async def status(self) -> list[ShardStatus | CoordinatorUnavailable]:
        """Returns the status of each copy, or the error that explains its absence."""
        return await asyncio.gather(*(self._status(name) for name in self._names))

    async def _status(self, name: str) -> ShardStatus | CoordinatorUnavailable:
        try:
            async with asyncio.timeout(STATUS_S):
                status: ShardStatus = await self._call(name, lambda shard: shard.status.remote(), by_ray=True)
        except CoordinatorUnavailable as error:
            return error
        except TimeoutError:
            return CoordinatorUnavailable(f"the actor {name!r} does not answer within {STATUS_S:g} s")
        return status

    async def _ask(self, name: str, method: str, tell: Tell, options: Mapping[str, Any]) -> Any:
        """Tells a copy what has changed, and everything if it has forgotten. See `_call` for what is raised."""
        told = self._told[name]

        def ask(shard: ActorHandle) -> Any:
            return getattr(shard, method).remote(tell(told), **options)

        async def asked() -> Any:
            return await self._call(name, ask)

        try:
            try:
                return await asked()
            except LostSessionError:
                told.forget()
                return await asked()
        except BaseException as error:  # the copy may have been told, or not
            told.forget()
            if isinstance(error, LostSessionError):
                raise CoordinatorUnavailable(f"the actor {name!r} remembers nothing") from error
            raise

    async def _call(self, name: str, method: ShardCall, *, by_ray: bool = False) -> Any:
        """Calls one copy. Forwards a cancellation of a call of Ray. A call on a line runs nevertheless.

        Raises:
            CoordinatorUnavailable, ValueError: see `first`.
            LostSessionError: the copy does not remember what it was told.
            AbsentPeersError: shards that it has called do not answer.
        """
        shard = await self._handle(name) if by_ray or self._lines is None else await self._line(name, self._lines)
        call = method(shard)
        try:
            return await call
        except asyncio.CancelledError:
            if isinstance(call, ObjectRef):
                ray.cancel(call)
            raise
        except Exception as error:
            cause = cause_of(error)
            if isinstance(cause, ValueError | LostSessionError | AbsentPeersError):
                raise cause from None
            if not isinstance(cause, RayError | ConnectionError):
                raise CoordinatorUnavailable(f"the actor {name!r} failed: {type(cause).__name__}") from error
            self._handles.pop(name, None)  # the fleet may start a new actor under this name
            if self._lines is not None and self._lines.get(name) is shard:
                self._lines.pop(name).close()
            raise _silent(name, error) from error

    async def _handle(self, name: str) -> ActorHandle:
        if name not in self._handles:
            try:
                self._handles[name] = await asyncio.to_thread(self._actor, name)
            except (ValueError, RayError):  # RayError: the head node does not answer
                raise CoordinatorUnavailable(f"the actor {name!r} is not alive") from None
        return self._handles[name]

    async def _line(self, name: str, lines: dict[str, Line]) -> Line:
        if name not in lines:
            async with self._connecting[name]:
                if name not in lines:
                    shard = await self._handle(name)
                    try:
                        lines[name] = await Line.to(await shard.line.remote())
                    except (RayError, OSError) as error:
                        self._handles.pop(name, None)
                        raise _silent(name, error) from error
        return lines[name]


def _silent(name: str, error: Exception) -> CoordinatorUnavailable:
    return CoordinatorUnavailable(f"the actor {name!r} does not answer: {type(error).__name__}")


async def _first(calls: Sequence[asyncio.Task[Any]], timeout_s: float | None) -> int | None:
    """Returns the index of the first call that ends, or None within the timeout. Passes over those of absent copies."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    waiting = set(calls)
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if ended := [call for call in done if not isinstance(call.exception(), CoordinatorUnavailable)]:
            return calls.index(ended[0])
        if not done:
            return None
    return None
