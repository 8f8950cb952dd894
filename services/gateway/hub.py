"""Which coordinator carries which generation, and what each request needs to go on with another one."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, replace
from itertools import count, groupby
from typing import Any

from ray.exceptions import RayTaskError

from services.coordinator.messages import CoordinatorError, Delta, Generation, Overloaded, Unavailable
from services.coordinator.recovery import cause_of, passes
from services.gateway.channel import Channel, Submission
from services.gateway.errors import ApiError, coordinator_lost, from_coordinator, unavailable, unexpected
from services.gateway.metrics import resumed
from services.gateway.seen import SeenTokens

Ended = Callable[[int | None], Awaitable[None]]

logger = logging.getLogger(__name__)

RETRY_S = 0.2
"""Between two looks for a coordinator that takes a generation."""
MOST_LOSSES = 3
"""A generation that loses more coordinators than this without a token between them may be what ends them."""
WIND_UP_S = 30.0
"""For the last deltas of generations that were cancelled."""


class Progress:
    """One generation as its request knows it: what was released, and which submission goes on with it."""

    def __init__(self, generation: Generation) -> None:
        self.attempt: _Attempt | None = None
        """The present submission; None while no coordinator has the generation."""
        self.losses = 0
        """Coordinators lost since the last token."""
        self._generation = generation
        self._released: list[int] = []

    @property
    def id(self) -> str:
        return self._generation.id

    def hear(self, delta: Delta) -> None:
        if delta.token_ids:
            self._released += delta.token_ids
            self.losses = 0

    def submitted_as(self, id_: str) -> Generation:
        """What a coordinator needs to go on with the answer."""
        return replace(self._generation, id=id_, released=(*self._generation.released, *self._released))


class Mailbox:
    """Owns the state of one request's generations, and hands their deltas to the one task that answers the request."""

    def __init__(
        self,
        generations: Sequence[Generation],
        stall_timeout_s: float,
        seen: SeenTokens,
        since: float,
        cut: frozenset[str] = frozenset(),
    ) -> None:
        self.open = {generation.id: Progress(generation) for generation in generations}
        """Generations whose last delta has not come."""
        self.charged = 0
        """Tokens released so far, without those that the public model answered at no charge."""
        self.begun = False
        """Whether a coordinator may have begun a generation."""
        self.left = False
        """Whether the request is over: what is open is cancelled, and goes on nowhere."""
        self.placing = asyncio.Lock()
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
            self.open.pop(delta.id, None)
        elif delta.id in self.open:
            self.open[delta.id].hear(delta)
        if not self.open:
            self._complete.set()
        self._arrived.set()

    def fail(self, failure: ApiError) -> None:
        """No more is done for the generations that are open."""
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
    def over(self) -> bool:
        """Whether nobody waits for more."""
        return self.left or self._failure is not None or not self.open

    @property
    def adrift(self) -> list[Progress]:
        """The open generations that no coordinator has."""
        return [progress for progress in self.open.values() if progress.attempt is None]

    @property
    def drained(self) -> bool:
        """Every generation has ended and everything was taken."""
        return not self.open and not self._waiting

    async def take(self) -> list[Delta]:
        """All deltas that wait, at least one.

        Raises:
            ApiError: 503 when no coordinator went on in time, or when nothing came for the stall timeout.
        """
        try:
            # Python 3.11's wait_for swallows a cancellation that comes with a delta, and the request would go on.
            async with asyncio.timeout(self._stall_timeout_s):
                await self._arrived.wait()
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
            async with asyncio.timeout(seconds):
                await self._complete.wait()


@dataclass(frozen=True, eq=False)
class _Attempt:
    """One submission of one generation. Each has an id of its own: what a lost coordinator still says is dropped."""

    id: str
    mailbox: Mailbox
    progress: Progress
    channel: Channel
    submission: Submission


class Hub:
    """Submits each generation to the coordinator with the least load, and hands the request its deltas.

    When that coordinator is lost the generation is submitted again, with the tokens that were released; the client sees
    a pause. Tokens that the lost coordinator charged and did not deliver stay charged.

    Args:
        stall_timeout_s: how long a request waits for its next delta.
        recovery_s: for how long a coordinator is looked for that takes a generation.
    """

    def __init__(
        self, namespace: str, coordinator_actors: Iterable[str], stall_timeout_s: float, recovery_s: float
    ) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._recovery_s = recovery_s
        self.seen = SeenTokens()
        self._channels = [Channel(namespace, actor, self._deliver, self._set_adrift) for actor in coordinator_actors]
        self._mailboxes: set[Mailbox] = set()
        self._attempts: dict[str, _Attempt] = {}
        self._numbers = count()
        # The event loop itself keeps tasks by weak references only.
        self._background: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> int:
        """How many coordinators answer."""
        return sum(channel.open for channel in self._channels)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the channels open for the time of the context."""
        async with AsyncExitStack() as stack:
            for channel in self._channels:
                await stack.enter_async_context(channel.running())
            yield

    @property
    def live(self) -> int:
        """Generations that have not ended."""
        return sum(len(mailbox.open) for mailbox in self._mailboxes)

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
        mailbox = Mailbox(generations, self._stall_timeout_s, self.seen, arrived, cut)
        self._mailboxes.add(mailbox)
        try:
            await self._place(mailbox, first=True)
            yield mailbox
        finally:
            mailbox.left = True
            self.in_background(self._wind_up(mailbox, ended))

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that outlives the request: Ray cancels with a call whatever was called in its context."""
        task = asyncio.create_task(work, context=Context())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _place(self, mailbox: Mailbox, *, first: bool = False) -> None:
        """Submit what is adrift until coordinators have it.

        Args:
            first: the client can still be told that there are too many requests.

        Raises:
            ApiError: no coordinator took it in time.
        """
        deadline = time.monotonic() + self._recovery_s
        async with mailbox.placing:
            while (adrift := mailbox.adrift) and not mailbox.over:
                refusal = await self._submit_to_one(mailbox, adrift)
                if refusal is None:
                    continue
                if (first and isinstance(refusal, Overloaded)) or time.monotonic() >= deadline:
                    raise from_coordinator(refusal)
                await asyncio.sleep(RETRY_S)

    async def _resume(self, mailbox: Mailbox) -> None:
        """Go on with what is adrift; the request fails where that is not possible."""
        try:
            await self._place(mailbox)
        except ApiError:
            mailbox.fail(coordinator_lost())
        except Exception as error:
            logger.exception("a generation was not submitted again: %s", type(error).__name__)
            mailbox.fail(unexpected())

    async def _submit_to_one(self, mailbox: Mailbox, adrift: Sequence[Progress]) -> CoordinatorError | None:
        """Submit to the coordinator with the least load that takes them; None where one did, else why none does."""
        refusal: CoordinatorError = Unavailable("no coordinator answers")
        for channel in sorted(self._channels, key=lambda channel: channel.load):
            if not channel.open:
                continue
            try:
                await self._begin(channel, mailbox, adrift)
                return None
            except Exception as error:
                if not passes(error):
                    raise
                cause = cause_of(error)
                if isinstance(cause, CoordinatorError) and not isinstance(refusal, Overloaded):
                    refusal = cause
        return refusal

    async def _begin(self, channel: Channel, mailbox: Mailbox, adrift: Sequence[Progress]) -> None:
        named = {f"{progress.id}-{next(self._numbers)}": progress for progress in adrift}
        submission = channel.submit([progress.submitted_as(id_) for id_, progress in named.items()])
        attempts = [_Attempt(id_, mailbox, progress, channel, submission) for id_, progress in named.items()]
        for attempt in attempts:
            self._attempts[attempt.id] = attempt.progress.attempt = attempt
        try:
            await submission.accepted()
        except Exception as error:
            refused = _refused(error)
            mailbox.begun |= not refused
            self._give_up([attempt for attempt in attempts if attempt.id in self._attempts], cancel=not refused)
            raise
        except asyncio.CancelledError:  # winding up cancels them
            mailbox.begun = True
            raise
        mailbox.begun = True

    def _give_up(self, attempts: Sequence[_Attempt], *, cancel: bool = True) -> None:
        """Hear nothing more of these. Where their coordinator lives, it must not charge for them either."""
        for attempt in attempts:
            del self._attempts[attempt.id]
            attempt.progress.attempt = None
        if cancel:
            self.in_background(_cancel(attempts))

    def _set_adrift(self, channel: Channel) -> None:
        """A coordinator is lost: every generation that it had goes on with another one."""
        attempts = [attempt for attempt in self._attempts.values() if attempt.channel is channel]
        self._give_up(attempts)
        for attempt in attempts:
            attempt.progress.losses += 1
        for mailbox in {attempt.mailbox for attempt in attempts}:
            if mailbox.left or any(progress.losses > MOST_LOSSES for progress in mailbox.adrift):
                mailbox.fail(coordinator_lost())
            else:
                resumed.inc(len(mailbox.adrift))
                self.in_background(self._resume(mailbox))

    def _deliver(self, batch: Sequence[Delta]) -> None:
        for delta in batch:
            if attempt := self._attempts.get(delta.id):
                if delta.finish_reason is not None:
                    del self._attempts[delta.id]
                attempt.mailbox.put(replace(delta, id=attempt.progress.id))

    async def _wind_up(self, mailbox: Mailbox, ended: Ended | None) -> None:
        """Cancel what is left, and count its tokens to the last."""
        async with mailbox.placing:
            carried = [progress.attempt for progress in mailbox.open.values() if progress.attempt]
        await _cancel(carried)
        if carried and ended is not None:
            await mailbox.gather(WIND_UP_S)
        for attempt in carried:
            self._attempts.pop(attempt.id, None)
        self._mailboxes.discard(mailbox)
        if ended is not None:
            await ended(None if mailbox.begun and mailbox.open else mailbox.charged)


async def _cancel(attempts: Sequence[_Attempt]) -> None:
    for submission, theirs in groupby(attempts, key=lambda attempt: attempt.submission):
        await submission.cancel([attempt.id for attempt in theirs])


def _refused(error: Exception) -> bool:
    """Whether the coordinator said that it starts nothing."""
    return isinstance(error, RayTaskError) and isinstance(error.cause, CoordinatorError)
