"""The gateway's one line to the coordinator: every replica reads one stream of deltas for all its requests.

Ray spends some tens of microseconds per item of a stream, so one item a step for all requests is what keeps many
concurrent streams cheap.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from dataclasses import replace
from itertools import count
from typing import Any
from uuid import uuid4

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError, TaskCancelledError

from services.coordinator.messages import CoordinatorError, Delta, Generation
from services.gateway.errors import ApiError, from_coordinator, unavailable
from services.gateway.seen import Seen

Ended = Callable[[int | None], Awaitable[None]]

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
# For the last deltas of generations that were cancelled.
WIND_UP_S = 30.0
# Only with a limit does Ray close the coordinator's end when this process dies; without one it would read on for a
# dead gateway, and tokens that nobody receives would be charged. Batches grow while the limit is reached.
UNREAD_BATCHES = 16


class Mailbox:
    """The deltas of one request's generations, from the hub to the one task that answers the request."""

    def __init__(
        self, ids: Iterable[str], stall_timeout_s: float, seen: Seen, since: float, cut: frozenset[str] = frozenset()
    ) -> None:
        self.open = set(ids)
        """Generations whose last delta has not come."""
        self.charged = 0
        """Tokens released so far, without those that the public model answered at no charge."""
        self._cut = cut
        self._seen = seen
        self._since: float | None = since
        self._stall_timeout_s = stall_timeout_s
        self._waiting: list[Delta] = []
        self._failure: ApiError | None = None
        self._arrived = asyncio.Event()
        self._complete = asyncio.Event()

    def put(self, delta: Delta) -> None:
        if delta.finish_reason == "length" and delta.id in self._cut:
            delta = replace(delta, finish_reason="share")
        self._waiting.append(delta)
        self._count(delta)
        if delta.finish_reason is not None:
            self.open.discard(delta.id)
        if not self.open:
            self._complete.set()
        self._arrived.set()

    def fail(self, failure: ApiError) -> None:
        if self.open:
            self._failure = failure
            self._complete.set()
            self._arrived.set()

    def _count(self, delta: Delta) -> None:
        self.charged += 0 if delta.public else delta.tokens
        self._seen.tokens(delta.tokens)
        if delta.tokens and self._since is not None:
            self._seen.first_token(time.monotonic() - self._since)
            self._since = None

    @property
    def lost(self) -> bool:
        """The line broke while a generation was open: nobody knows what was released."""
        return self._failure is not None

    async def ended(self, seconds: float) -> bool:
        """Whether every generation has ended within this time."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._complete.wait(), seconds)
        return not self.open

    @property
    def drained(self) -> bool:
        """Every generation has ended and everything was taken."""
        return not self.open and not self._waiting

    async def take(self) -> list[Delta]:
        """All deltas that wait, at least one.

        Raises:
            ApiError: 503 when the line broke, or when nothing came for the stall timeout.
        """
        try:
            await asyncio.wait_for(self._arrived.wait(), self._stall_timeout_s)
        except TimeoutError:
            raise unavailable("no token came in time", "stalled") from None
        self._arrived.clear()
        if self._failure is not None:
            raise self._failure
        waiting, self._waiting = self._waiting, []
        return waiting

    async def gather(self, seconds: float) -> None:
        """Let deltas gather for this long, or until no more will come."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._complete.wait(), seconds)


class Hub:
    """Submits generations to the named coordinator and hands each its deltas.

    A broken line fails all waiting requests with 503, since their deltas may be lost; then the hub looks the actor up
    again, with growing pauses.
    """

    def __init__(self, namespace: str, coordinator_actor: str, stall_timeout_s: float) -> None:
        self._namespace = namespace
        self._actor = coordinator_actor
        self._stall_timeout_s = stall_timeout_s
        self.seen = Seen()
        self._coordinator: ActorHandle | None = None
        self._line = ""
        self._mailboxes: dict[str, Mailbox] = {}
        # The event loop itself keeps tasks by weak references only.
        self._background: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        return self._coordinator is not None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the line open for the time of the context."""
        keeper = asyncio.create_task(self._keep_line())
        try:
            yield
        finally:
            keeper.cancel()
            with suppress(asyncio.CancelledError):
                await keeper

    @property
    def live(self) -> int:
        """Generations that have not ended."""
        return len(self._mailboxes)

    @asynccontextmanager
    async def submit(
        self,
        generations: Sequence[Generation],
        *,
        since: float | None = None,
        cut: frozenset[str] = frozenset(),
        ended: Ended | None = None,
    ) -> AsyncIterator[Mailbox]:
        """Start generations; those that have not ended when the context is left are cancelled.

        Args:
            since: when the request arrived, of `time.monotonic()`.
            cut: generations that were given fewer tokens than the client asked for.
            ended: is told once how many tokens were charged, after the last of them; None where nobody knows.

        Raises:
            ApiError: 429 or 503, nothing was started.
        """
        arrived = time.monotonic() if since is None else since
        mailbox = Mailbox((each.id for each in generations), self._stall_timeout_s, self.seen, arrived, cut)
        coordinator = self._coordinator
        submission: asyncio.Future[None] | None = None
        try:
            if coordinator is None:
                raise unavailable(f"the actor {self._actor!r} does not answer")
            self._mailboxes |= dict.fromkeys(mailbox.open, mailbox)
            submission = asyncio.ensure_future(coordinator.submit.remote(self._line, list(generations)))
            await self._accepted(submission)
            yield mailbox
        finally:
            ids = [generation.id for generation in generations]
            self.in_background(self._wind_up(coordinator, submission, mailbox, ids, ended))

    async def _wind_up(
        self,
        coordinator: ActorHandle | None,
        submission: asyncio.Future[None] | None,
        mailbox: Mailbox,
        ids: Sequence[str],
        ended: Ended | None,
    ) -> None:
        """Cancel what is left, and count its tokens to the last."""
        begun = coordinator is not None and submission is not None and not _refused(submission)
        if begun and mailbox.open:
            await _cancel(coordinator, submission, sorted(mailbox.open))
            if ended is not None:
                await mailbox.ended(WIND_UP_S)
        for id_ in ids:
            self._mailboxes.pop(id_, None)
        if ended is not None:
            unknown = begun and (mailbox.open or mailbox.lost)
            await ended(None if unknown else mailbox.charged)

    async def _accepted(self, submission: asyncio.Future[None]) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(submission), self._stall_timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, CoordinatorError):
                raise from_coordinator(error.cause) from None
            raise
        except (RayError, TimeoutError):
            raise unavailable(f"the actor {self._actor!r} does not answer") from None

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that outlives the request: Ray cancels with a call whatever was called in its context."""
        task = asyncio.create_task(work, context=Context())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _keep_line(self) -> None:
        pause = FIRST_RETRY_S
        name = uuid4().hex
        for attempt in count():
            # A line has its own name, so that nothing meant for a broken one reaches its successor.
            self._line = f"{name}-{attempt}"
            try:
                async for batch in self._batches():
                    pause = FIRST_RETRY_S
                    self._deliver(batch)
            except Exception as error:
                logger.warning("line to %s is down: %s", self._actor, type(error).__name__)
            finally:
                self._coordinator = None
                self._fail_all()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_S)

    async def _batches(self) -> AsyncIterator[list[Delta]]:
        # ray.get_actor would start a cluster of its own.
        if not ray.is_initialized():
            raise RuntimeError("Ray is not initialised")
        coordinator = await asyncio.to_thread(ray.get_actor, self._actor, self._namespace)
        events = coordinator.events.options(_generator_backpressure_num_objects=UNREAD_BATCHES).remote(self._line)
        self._coordinator = coordinator
        try:
            async for batch in events:
                yield await batch
        finally:
            if ray.is_initialized():
                ray.cancel(events, recursive=False)

    def _deliver(self, batch: Sequence[Delta]) -> None:
        for delta in batch:
            if mailbox := self._mailboxes.get(delta.id):
                mailbox.put(delta)

    def _fail_all(self) -> None:
        for mailbox in set(self._mailboxes.values()):
            mailbox.fail(unavailable("the coordinator was lost while it answered", "coordinator_lost"))


def _refused(submission: asyncio.Future[None]) -> bool:
    """Whether the coordinator said that it starts nothing."""
    if not submission.done() or submission.cancelled():
        return False
    error = submission.exception()
    return isinstance(error, RayTaskError) and isinstance(error.cause, CoordinatorError)


async def _cancel(coordinator: ActorHandle | None, submission: asyncio.Future[None] | None, ids: Sequence[str]) -> None:
    """Cancel what was submitted, once it was: Ray may run calls to an async actor in another order than they came."""
    if coordinator is None or submission is None:
        return
    with suppress(RayError):
        with suppress(TaskCancelledError):  # it may have been carried out all the same
            await submission
        await coordinator.cancel.remote(ids)
