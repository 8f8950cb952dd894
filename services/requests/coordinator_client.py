"""Submits generations to the coordinators, and continues them on another coordinator when one dies."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, replace
from itertools import count, groupby
from typing import Any
from uuid import uuid4

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.metrics import Counter

from services.actors import find_actor
from services.coordinator.messages import Delta, Generation
from services.coordinator.recovery import cause_of, is_temporary
from services.errors import CoordinatorError, CoordinatorStopping, CoordinatorUnavailable, Overloaded
from services.keys.messages import EnsembleTraffic, TrafficUpdate
from services.requests.errors import ApiError, coordinator_lost, from_coordinator, unavailable, unexpected

resumed = Counter(
    "privmix_generations_resumed", "Generations that were submitted again, as their coordinator was lost."
)
MOST_TIMES = 200


class TokenCounters:
    """Counts the tokens of one ensemble."""

    def __init__(self) -> None:
        self._traffic = EnsembleTraffic()

    def tokens(self, count: int) -> None:
        """Counts released tokens."""
        self._traffic.tokens += count

    def first_token(self, seconds: float) -> None:
        """Records the time from a request to its first token."""
        if len(self._traffic.first_token_s) < MOST_TIMES:
            self._traffic.first_token_s.append(seconds)

    def take(self, live: int) -> EnsembleTraffic:
        """Returns the counts since the last call. `live` is the current number of generations."""
        traffic, self._traffic = self._traffic, EnsembleTraffic()
        traffic.live = live
        return traffic


class RequestCounters:
    """Counts requests of all ensembles together, because a request may be refused before its ensemble is known."""

    def __init__(self) -> None:
        self._update = TrafficUpdate()

    def request(self) -> None:
        self._update.requests += 1

    def refused(self, code: str) -> None:
        """Counts a refusal by its error code."""
        self._update.refusals[code] = self._update.refusals.get(code, 0) + 1

    def take(self, ensembles: Mapping[str, EnsembleTraffic]) -> TrafficUpdate:
        """Returns the counts since the last call, together with the traffic of the ensembles."""
        update, self._update = self._update, TrafficUpdate()
        update.ensembles = dict(ensembles)
        return update


logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 1.0
BEAT_S = 1.0
SILENT_S = 30.0
"""A coordinator that does not answer for this long is considered lost."""
# Ray closes the coordinator's end of the stream after the death of this process only if there is such a limit. Without
# it, the coordinator would continue for a dead gateway and charge tokens that nobody receives. While the limit is
# reached, the batches grow.
UNREAD_BATCHES = 16


class Channel:
    """Connects to a coordinator by its actor's name, and reconnects whenever the connection is lost.

    Args:
        on_deltas: called with the deltas of every step.
        on_loss: called when the connection is lost. Deltas of earlier submissions do not arrive afterwards.

    Attributes:
        load: the last known number of generations that the coordinator has.
    """

    def __init__(
        self,
        namespace: str,
        actor: str,
        on_deltas: Callable[[Sequence[Delta]], None],
        on_loss: Callable[["Channel"], None],
    ) -> None:
        self.actor = actor
        self.load = 0
        self._namespace = namespace
        self._on_deltas = on_deltas
        self._on_loss = on_loss
        self._coordinator: ActorHandle | None = None
        self._name = ""

    @property
    def open(self) -> bool:
        """Whether the coordinator answers."""
        return self._coordinator is not None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keeps the channel open until the context exits."""
        task = asyncio.create_task(self._keep_open())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def submit(self, generations: Sequence[Generation]) -> "Submission":
        """Submits generations to the coordinator. The channel must be open."""
        assert self._coordinator is not None
        self.load += len(generations)
        return Submission(self._coordinator, self._name, generations)

    async def _keep_open(self) -> None:
        pause = FIRST_RETRY_S
        name = uuid4().hex
        for attempt in count():
            # Each connection has a new name, so that deltas for a broken connection do not reach the next one.
            self._name = f"{name}-{attempt}"
            try:
                async with asyncio.TaskGroup() as tasks:
                    coordinator = await find_actor(self.actor, self._namespace)
                    tasks.create_task(self._read(coordinator))
                    tasks.create_task(self._follow_load(coordinator))
            except* Exception as errors:
                logger.warning("the channel to %s is broken: %s", self.actor, type(errors.exceptions[0]).__name__)
            finally:
                pause = FIRST_RETRY_S if self.open else min(2 * pause, LONGEST_RETRY_S)
                self._coordinator = None
                self._on_loss(self)
            await asyncio.sleep(pause)

    async def _read(self, coordinator: ActorHandle) -> None:
        events = coordinator.events.options(_generator_backpressure_num_objects=UNREAD_BATCHES).remote(self._name)
        try:
            async for batch in events:
                self._on_deltas(await batch)
        finally:
            if ray.is_initialized():
                ray.cancel(events, recursive=False)
        raise ConnectionError("the coordinator ended the channel")

    async def _follow_load(self, coordinator: ActorHandle) -> None:
        """Polls the load, which also shows whether the coordinator answers."""
        while True:
            async with asyncio.timeout(SILENT_S):
                self.load = await coordinator.load.remote()
            self._coordinator = coordinator
            await asyncio.sleep(BEAT_S)


class Submission:
    """Represents generations that were sent to a coordinator. They start even if nothing awaits `accepted`."""

    def __init__(self, coordinator: ActorHandle, channel: str, generations: Sequence[Generation]) -> None:
        self._coordinator = coordinator
        self._call: asyncio.Future[None] = asyncio.ensure_future(coordinator.submit.remote(channel, list(generations)))

    async def accepted(self) -> None:
        """Returns once the generations have started.

        Raises:
            CoordinatorError: the coordinator refused them; none has started.
            ray.exceptions.RayError, TimeoutError: it is unknown whether they have started.
        """
        async with asyncio.timeout(SILENT_S):
            await asyncio.shield(self._call)

    async def cancel(self, ids: Sequence[str]) -> None:
        """Cancels generations after their submission, because Ray may reorder calls to an async actor."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SILENT_S):
                await asyncio.wait([self._call])  # A failed call may have been executed, so cancel after it too.
                with suppress(RayError):
                    await self._coordinator.cancel.remote(list(ids))


OnEnd = Callable[[int | None], Awaitable[None]]

RETRY_S = 0.2
"""The time between two attempts to find a coordinator that accepts a generation."""
MAX_LOSSES = 3
"""A generation fails when more coordinators than this die without releasing a token of it: it may be the cause."""
FINISH_S = 30.0
"""How long to wait for the last deltas of cancelled generations."""


class GenerationState:
    """Holds the state of one generation: its released tokens and its current submission.

    Attributes:
        attempt: the current submission; None while no coordinator has the generation.
        losses: the number of coordinators that died since the last token.
    """

    def __init__(self, generation: Generation) -> None:
        self.attempt: _Attempt | None = None
        self.losses = 0
        self._generation = generation
        self._released: list[int] = []
        self._charged = 0

    @property
    def id(self) -> str:
        return self._generation.id

    def add(self, delta: Delta) -> None:
        """Records the released tokens of a delta."""
        if delta.token_ids:
            self._released += delta.token_ids
            self.losses = 0
        self._charged += delta.charged

    def submitted_as(self, id_: str) -> Generation:
        """Returns the generation with the tokens released so far, so that a coordinator can continue it."""
        limit = self._generation.max_charged
        return replace(
            self._generation,
            id=id_,
            released=(*self._generation.released, *self._released),
            max_charged=limit and limit - self._charged,
        )


class ResponseQueue:
    """Owns the state of one request's generations and passes their deltas to the task that answers the request.

    Attributes:
        open: the generations whose last delta has not arrived, by id.
        charged: the number of released tokens without those of the public model and those without an alternative.
        may_have_started: whether a coordinator may have started a generation.
        closed: whether the request is over. Its open generations are cancelled and not submitted again.
        submitting: held while generations are submitted.
        held_back: the ids of generations that may not start yet.
        ended: the number of generations that have ended. `has_ended` is set when it grows.
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        stall_timeout_s: float,
        counters: TokenCounters,
        arrived: float,
        truncated: frozenset[str] = frozenset(),
        held_back: Iterable[str] = (),
    ) -> None:
        self.held_back = set(held_back)
        self.ended = 0
        self.has_ended = asyncio.Event()
        self.open = {generation.id: GenerationState(generation) for generation in generations}
        self.charged = 0
        self.may_have_started = False
        self.closed = False
        self.submitting = asyncio.Lock()
        self._truncated = truncated
        self._counters = counters
        self._arrived = arrived
        self._has_token = False
        self._stall_timeout_s = stall_timeout_s
        self._deltas: list[Delta] = []
        self._failure: ApiError | None = None
        self._has_news = asyncio.Event()
        self._complete = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """Adds a delta. A generation that its share truncated ends with the reason `share` instead of `length`."""
        if delta.finish_reason == "length" and delta.id in self._truncated:
            delta = replace(delta, finish_reason="share")
        self._deltas.append(delta)
        self._count(delta)
        if delta.finish_reason is not None:
            self.open.pop(delta.id, None)
            self.ended += 1
            self.has_ended.set()
        elif delta.id in self.open:
            self.open[delta.id].add(delta)
        if not self.open:
            self._complete.set()
        self._has_news.set()

    def fail(self, failure: ApiError) -> None:
        """Fails the request if it has open generations."""
        if self.open:
            self._failure = failure
            self._complete.set()
            self._has_news.set()

    def _count(self, delta: Delta) -> None:
        self.charged += delta.charged
        self._counters.tokens(delta.tokens)
        if delta.tokens and not self._has_token:
            self._counters.first_token(time.monotonic() - self._arrived)
            self._has_token = True

    @property
    def finished(self) -> bool:
        """Whether the request needs no more deltas."""
        return self.closed or self._failure is not None or not self.open

    @property
    def unassigned(self) -> list[GenerationState]:
        """The open generations that may start and that no coordinator has."""
        return [state for id_, state in self.open.items() if state.attempt is None and id_ not in self.held_back]

    @property
    def drained(self) -> bool:
        """Whether every generation has ended and every delta was taken."""
        return not self.open and not self._deltas

    async def take(self) -> list[Delta]:
        """Waits for deltas and returns all that have arrived, at least one.

        Raises:
            ApiError: 503, no coordinator continued in time or no delta arrived within the stall timeout.
        """
        try:
            # Python 3.11's wait_for loses a cancellation that coincides with a delta, so the request would continue.
            async with asyncio.timeout(self._stall_timeout_s):
                await self._has_news.wait()
        except TimeoutError:
            raise unavailable("no token was generated in time", "stalled") from None
        self._has_news.clear()
        if self._failure is not None:
            raise self._failure
        deltas, self._deltas = self._deltas, []
        return deltas

    async def wait_for_more(self, seconds: float) -> None:
        """Lets deltas accumulate for this long, or until no more can arrive."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._complete.wait()


@dataclass(frozen=True, eq=False)
class _Attempt:
    """Holds one submission of one generation. Its unique id lets late deltas of a lost coordinator be dropped."""

    id: str
    queue: ResponseQueue
    state: GenerationState
    channel: Channel
    submission: Submission


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
        self.counters = TokenCounters()
        self._channels = [Channel(namespace, actor, self._deliver, self._reassign) for actor in coordinator_actors]
        self._queues: set[ResponseQueue] = set()
        self._attempts: dict[str, _Attempt] = {}
        self._numbers = count()
        # Strong references, because the event loop itself holds only weak references to tasks.
        self._background: set[asyncio.Task[None]] = set()

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
        arrived: float | None = None,
        truncated: frozenset[str] = frozenset(),
        held_back: Iterable[str] = (),
        on_end: OnEnd | None = None,
    ) -> AsyncIterator[ResponseQueue]:
        """Starts generations. Cancels those that have not ended when the context exits.

        Args:
            arrived: when the request arrived, by `time.monotonic()`; now if None.
            truncated: the ids of generations that got fewer tokens than the client requested.
            held_back: the ids of generations that `start` starts later.
            on_end: called once after the last token with the number of charged tokens, or None if it is unknown.

        Raises:
            ApiError: 429 or 503, nothing was started.
        """
        arrived = time.monotonic() if arrived is None else arrived
        queue = ResponseQueue(generations, self._stall_timeout_s, self.counters, arrived, truncated, held_back)
        self._queues.add(queue)
        try:
            await self._submit_unassigned(queue, first=True)
            yield queue
        finally:
            queue.closed = True
            self.in_background(self._finish(queue, on_end))

    async def start(self, queue: ResponseQueue, ids: Iterable[str]) -> None:
        """Starts generations that were held back, as `_resume` continues others."""
        queue.held_back.difference_update(ids)
        await self._resume(queue)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work that outlives the request. In a new context, because Ray cancels what a cancelled call called."""
        task = asyncio.create_task(work, context=Context())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _submit_unassigned(self, queue: ResponseQueue, *, first: bool = False) -> None:
        """Submits the unassigned generations, and retries until coordinators have accepted all of them.

        Args:
            first: whether the request is new, so that it can be refused if the service is overloaded.

        Raises:
            ApiError: no coordinator accepted them in time.
        """
        deadline = time.monotonic() + self._recovery_s
        async with queue.submitting:
            while (unassigned := queue.unassigned) and not queue.finished:
                refusal = await self._submit_to_any(queue, unassigned)
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

    async def _submit_to_any(
        self, queue: ResponseQueue, unassigned: Sequence[GenerationState]
    ) -> CoordinatorError | None:
        """Submits to the least loaded coordinator that accepts. Returns None on success, else why none accepts."""
        refusal: CoordinatorError = CoordinatorUnavailable("no coordinator answers")
        for channel in sorted(self._channels, key=lambda channel: channel.load):
            if not channel.open:
                continue
            try:
                await self._submit_to(channel, queue, unassigned)
                return None
            except Exception as error:
                if not is_temporary(error):
                    raise
                cause = cause_of(error)
                if isinstance(cause, CoordinatorError) and not isinstance(refusal, Overloaded):
                    refusal = cause
        return refusal

    async def _submit_to(self, channel: Channel, queue: ResponseQueue, unassigned: Sequence[GenerationState]) -> None:
        states = {f"{state.id}-{next(self._numbers)}": state for state in unassigned}
        submission = channel.submit([state.submitted_as(id_) for id_, state in states.items()])
        attempts = [_Attempt(id_, queue, state, channel, submission) for id_, state in states.items()]
        for attempt in attempts:
            self._attempts[attempt.id] = attempt.state.attempt = attempt
        try:
            await submission.accepted()
        except Exception as error:
            refused = _refused(error)
            queue.may_have_started |= not refused
            self._forget([attempt for attempt in attempts if attempt.id in self._attempts], cancel=not refused)
            raise
        except asyncio.CancelledError:  # `_finish` cancels the generations.
            queue.may_have_started = True
            raise
        queue.may_have_started = True

    def _forget(self, attempts: Sequence[_Attempt], *, cancel: bool = True) -> None:
        """Drops further deltas of these attempts, and cancels them so that a living coordinator stops charging."""
        for attempt in attempts:
            del self._attempts[attempt.id]
            attempt.state.attempt = None
        if cancel:
            self.in_background(_cancel(attempts))

    def _reassign(self, channel: Channel) -> None:
        """Continues all generations of a lost coordinator on other coordinators."""
        attempts = [attempt for attempt in self._attempts.values() if attempt.channel is channel]
        self._forget(attempts)
        for attempt in attempts:
            attempt.state.losses += 1
        for queue in {attempt.queue for attempt in attempts}:
            if queue.closed or any(state.losses > MAX_LOSSES for state in queue.unassigned):
                queue.fail(coordinator_lost())
            else:
                resumed.inc(len(queue.unassigned))
                self.in_background(self._resume(queue))

    def _deliver(self, batch: Sequence[Delta]) -> None:
        for delta in batch:
            if attempt := self._attempts.get(delta.id):
                if delta.finish_reason is not None:
                    del self._attempts[delta.id]
                attempt.queue.put(replace(delta, id=attempt.state.id))

    async def _finish(self, queue: ResponseQueue, on_end: OnEnd | None) -> None:
        """Cancels the open generations and reports the charged tokens once the last of them has arrived."""
        for id_ in queue.held_back:
            queue.open.pop(id_, None)  # it never started, so it charged nothing
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


async def _cancel(attempts: Sequence[_Attempt]) -> None:
    for submission, group in groupby(attempts, key=lambda attempt: attempt.submission):
        await submission.cancel([attempt.id for attempt in group])


def _refused(error: Exception) -> bool:
    """Returns whether the coordinator refused the submission, so that nothing was started."""
    return isinstance(error, RayTaskError) and isinstance(error.cause, CoordinatorError)
