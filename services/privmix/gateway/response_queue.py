"""Holds the state of a request: its generations, and the deltas that wait for the task that answers it."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from privmix.coordinator.messages import Delta, Generation
from privmix.gateway.channel import Channel, Submission
from privmix.gateway.counters import Counters
from privmix.gateway.errors import ApiError, unavailable


class GenerationState:
    """Holds the state of one generation: its released tokens and its current submission.

    Attributes:
        attempt: the current submission; None while no coordinator has the generation.
        losses: the number of coordinators that died since the last token.
    """

    def __init__(self, generation: Generation) -> None:
        self.attempt: Attempt | None = None
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
        charged: the number of tokens that were charged to the budget (`Delta.charged`).
        may_have_started: whether a coordinator may have started a generation.
        closed: whether the request is over. Its open generations are cancelled and not submitted again.
        submitting: held while generations are submitted.
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        stall_timeout_s: float,
        counters: Counters,
        truncated: frozenset[str] = frozenset(),
    ) -> None:
        self.open = {generation.id: GenerationState(generation) for generation in generations}
        self.charged = 0
        self.may_have_started = False
        self.closed = False
        self.submitting = asyncio.Lock()
        self._truncated = truncated
        self._counters = counters
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
        self.charged += delta.charged
        self._counters.tokens(delta.tokens)
        if delta.finish_reason is not None:
            self.open.pop(delta.id, None)
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

    @property
    def finished(self) -> bool:
        """Whether the request needs no more deltas."""
        return self.closed or self._failure is not None or not self.open

    @property
    def unassigned(self) -> list[GenerationState]:
        """The open generations that no coordinator has."""
        return [state for state in self.open.values() if state.attempt is None]

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
class Attempt:
    """Holds one submission of one generation. Its unique id lets late deltas of a lost coordinator be dropped."""

    id: str
    queue: ResponseQueue
    state: GenerationState
    channel: Channel
    submission: Submission
