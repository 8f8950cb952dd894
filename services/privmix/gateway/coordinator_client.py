"""Submits generations to the coordinators, and continues them on another coordinator when one dies."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count, groupby

from ray.exceptions import RayTaskError
from ray.util.metrics import Counter

from privmix.coordinator.messages import Delta, Generation
from privmix.coordinator.recovery import cause_of, is_temporary
from privmix.foundation.errors import CoordinatorError, CoordinatorStopping, CoordinatorUnavailable, Overloaded
from privmix.gateway.background import Background
from privmix.gateway.channel import Channel
from privmix.gateway.counters import Counters
from privmix.gateway.errors import ApiError, coordinator_lost, coordinators_lost, from_coordinator, unexpected
from privmix.gateway.response_queue import Attempt, ResponseQueue

resumed = Counter(
    "privmix_generations_resumed", "Generations that were submitted again, as their coordinator was lost."
)

logger = logging.getLogger(__name__)

OnEnd = Callable[[int | None], Awaitable[None]]

RETRY_S = 0.2
"""The time between two attempts to find a coordinator that accepts a generation."""
MAX_LOSSES = 3
"""A generation fails when more coordinators than this die without releasing a token of it: it may be the cause."""
FINISH_S = 30.0
"""How long to wait for the last deltas of cancelled generations."""


class CoordinatorClient:
    """Submits each generation to the coordinator with the least load and delivers its deltas to the request.

    When that coordinator dies, submits the generation again with the tokens released so far; the client sees a pause.
    Tokens that the dead coordinator sampled but did not deliver stay charged to the ledger, in its leases. A share does
    not count them where the answer is completed: the ledger does not know keys, so nobody knows their number, and the
    least bound is the rest of the answer, which the client still receives and pays for. A share divides the budget and
    protects nothing; `MAX_LOSSES` limits how often a request can cause it.

    Args:
        stall_timeout_s: how long a request waits for its next delta.
        recovery_s: how long a generation without a coordinator waits for one.
    """

    def __init__(
        self, namespace: str, coordinator_actors: Iterable[str], stall_timeout_s: float, recovery_s: float
    ) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._recovery_s = recovery_s
        self.counters = Counters()
        self._channels = [Channel(namespace, actor, self._deliver, self._reassign) for actor in coordinator_actors]
        self._queues: set[ResponseQueue] = set()
        self._attempts: dict[str, Attempt] = {}
        self._numbers = count()
        self._background = Background()

    @property
    def connected(self) -> int:
        """The number of coordinators that answer."""
        return sum(channel.open for channel in self._channels)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keeps the channels open until the context exits."""
        async with AsyncExitStack() as stack:
            for channel in self._channels:
                await stack.enter_async_context(channel.running())
            yield

    @property
    def live(self) -> int:
        """The number of generations that have not ended."""
        return sum(len(queue.open) for queue in self._queues)

    @asynccontextmanager
    async def submit(
        self,
        generations: Sequence[Generation],
        *,
        truncated: frozenset[str] = frozenset(),
        on_end: OnEnd | None = None,
    ) -> AsyncIterator[ResponseQueue]:
        """Starts generations. Cancels those that have not ended when the context exits.

        Args:
            truncated: the ids of generations that got fewer tokens than the client requested.
            on_end: called once after the last token with the number of charged tokens, or None if it is unknown.

        Raises:
            ApiError: 429 or 503, nothing was started.
        """
        queue = ResponseQueue(generations, self._stall_timeout_s, self.counters, truncated)
        self._queues.add(queue)
        try:
            await self._submit_unassigned(queue, first=True)
            yield queue
        finally:
            queue.closed = True
            self._background.start(self._finish(queue, on_end))

    async def _submit_unassigned(self, queue: ResponseQueue, *, first: bool = False) -> None:
        """Submits the unassigned generations, and retries until coordinators have accepted all of them.

        Args:
            first: whether the request is new, so that it can be refused if the service is overloaded.

        Raises:
            ApiError: no coordinator accepted them in time.
        """
        deadline = time.monotonic() + self._recovery_s
        async with queue.submitting:
            while queue.unassigned and not queue.finished:
                refusal = await self._submit_to_any(queue)
                if refusal is None:
                    continue
                final = isinstance(refusal, CoordinatorStopping) or (first and isinstance(refusal, Overloaded))
                if final or time.monotonic() >= deadline:
                    raise from_coordinator(refusal)
                await asyncio.sleep(RETRY_S)

    async def _resume(self, queue: ResponseQueue) -> None:
        """Continues the unassigned generations on other coordinators, or fails the request."""
        try:
            await self._submit_unassigned(queue)
        except ApiError:
            queue.fail(coordinator_lost())
        except Exception as error:
            logger.exception("a generation was not submitted again: %s", type(error).__name__)
            queue.fail(unexpected())

    async def _submit_to_any(self, queue: ResponseQueue) -> CoordinatorError | None:
        """Submits to the least loaded coordinator that accepts. Returns None on success, else why none accepts."""
        refusal: CoordinatorError = CoordinatorUnavailable("no coordinator answers")
        for channel in sorted(self._channels, key=lambda channel: channel.load):
            if not channel.open:
                continue
            try:
                await self._submit_to(channel, queue)
                return None
            except Exception as error:
                if not is_temporary(error):
                    raise
                cause = cause_of(error)
                if isinstance(cause, CoordinatorError) and not isinstance(refusal, Overloaded):
                    refusal = cause
        return refusal

    async def _submit_to(self, channel: Channel, queue: ResponseQueue) -> None:
        states = {f"{state.id}-{next(self._numbers)}": state for state in queue.unassigned}
        submission = channel.submit([state.submitted_as(id_) for id_, state in states.items()])
        attempts = [Attempt(id_, queue, state, channel, submission) for id_, state in states.items()]
        for attempt in attempts:
            self._attempts[attempt.id] = attempt.state.attempt = attempt
        try:
            await submission.accepted()
        except Exception as error:
            refused = _refused(error)
            queue.may_have_started |= not refused
            known = [attempt for attempt in attempts if attempt.id in self._attempts]  # `_reassign` has the others
            if refused:
                self._forget(known, cancel=False)
            else:
                self._lose(known)
            raise
        except asyncio.CancelledError:  # `_finish` cancels the generations.
            queue.may_have_started = True
            raise
        queue.may_have_started = True

    def _forget(self, attempts: Sequence[Attempt], *, cancel: bool = True) -> None:
        """Drops further deltas of these attempts, and cancels them so that a living coordinator stops charging."""
        for attempt in attempts:
            del self._attempts[attempt.id]
            attempt.state.attempt = None
        if cancel:
            self._background.start(_cancel(attempts))

    def _lose(self, attempts: Sequence[Attempt]) -> None:
        """Drops the attempts of a lost coordinator. Fails the requests that may be the cause of too many losses."""
        self._forget(attempts)
        for attempt in attempts:
            attempt.state.losses += 1
            if attempt.state.losses > MAX_LOSSES:
                attempt.queue.fail(coordinators_lost())

    def _reassign(self, channel: Channel) -> None:
        """Continues all generations of a lost coordinator on other coordinators."""
        attempts = [attempt for attempt in self._attempts.values() if attempt.channel is channel]
        self._lose(attempts)
        for queue in {attempt.queue for attempt in attempts}:
            if queue.closed:
                queue.fail(coordinator_lost())
            elif not queue.finished:
                resumed.inc(len(queue.unassigned))
                self._background.start(self._resume(queue))

    def _deliver(self, batch: Sequence[Delta]) -> None:
        for delta in batch:
            if attempt := self._attempts.get(delta.id):
                if delta.finish_reason is not None:
                    del self._attempts[delta.id]
                attempt.queue.put(replace(delta, id=attempt.state.id))

    async def _finish(self, queue: ResponseQueue, on_end: OnEnd | None) -> None:
        """Cancels the open generations and reports the charged tokens once the last of them has arrived."""
        async with queue.submitting:
            running = [state.attempt for state in queue.open.values() if state.attempt]
        await _cancel(running)
        if running and on_end is not None:
            await queue.wait_for_more(FINISH_S)
        for attempt in running:
            self._attempts.pop(attempt.id, None)
        self._queues.discard(queue)
        if on_end is not None:
            await on_end(None if queue.may_have_started and queue.open else queue.charged)


async def _cancel(attempts: Sequence[Attempt]) -> None:
    for submission, group in groupby(attempts, key=lambda attempt: attempt.submission):
        await submission.cancel([attempt.id for attempt in group])


def _refused(error: Exception) -> bool:
    """Returns whether the coordinator refused the submission, so that nothing was started."""
    return isinstance(error, RayTaskError) and isinstance(error.cause, CoordinatorError)
