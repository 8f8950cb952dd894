"""A coordinator's side of the budget: every token that it releases was charged durably before."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import uuid4

from ray.actor import ActorHandle
from ray.exceptions import RayError

from services import tracing
from services.budget.errors import LeaseRefused, LedgerError
from services.budget.ledger import Grant
from services.privacy.events import Event

STEPS_AHEAD = 2
"""A lease holds the tokens of at least this many steps, and the next one is requested that many steps ahead."""

_log = logging.getLogger(__name__)

Recall = Callable[[], Awaitable[None]]


async def _nobody() -> None:
    """There are no other holders of leases."""


@dataclass(eq=False)
class _Lease:
    name: str
    count: int
    released: int = 0
    reserved: int = 0
    unreserved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def left(self) -> int:
        return self.count - self.released - self.reserved

    def reserve(self, count: int) -> None:
        self.reserved += count
        self.unreserved.clear()

    def release(self, reserved: int, released: int) -> None:
        """End a reservation of `reserved` tokens, of which `released` have left."""
        self.reserved -= reserved
        self.released += released
        if not self.reserved:
            self.unreserved.set()


class Reservation:
    """Tokens that may be made, and released once they are charged. What is not released goes back to the budget.

    Attributes:
        count: how many tokens may be made; fewer than requested mean that the budget is used up.
    """

    def __init__(self, count: int, charge: Callable[[Sequence[Sequence[float]]], Awaitable[int]]) -> None:
        self.count = count
        self.released = 0
        self._charge = charge

    async def charge(self, losses: Sequence[Sequence[float]]) -> int:
        """Charge the losses of the first tokens, durably; returns how many of them are charged and may be released.

        Args:
            losses: for each token its losses (`Ledger.charge`); none where the event has a fixed cost, which a lease
                has charged already.

        Raises:
            LedgerError, ray.exceptions.RayError: none may be released.
        """
        return await self._charge(losses) if losses else self.count

    def release(self, count: int) -> None:
        """Say that `count` tokens leave now: from here on they stay charged."""
        if not 0 <= self.released + count <= self.count:
            raise ValueError(f"cannot release {count} more tokens of {self.count} with {self.released} released")
        self.released += count


class BudgetClient:
    """Reserves tokens, from leases where their cost is fixed, and charges measured ones before their release.

        client = BudgetClient(ray.get_actor(NAME, namespace))
        async with client.reserve(event, len(sequences)) as reserved:
            ...                                      # make at most `reserved.count` tokens
            granted = await reserved.charge(losses)  # at most this many of the first ones may be released
            reserved.release(granted)
        await client.settle()                        # before this process ends

    A lease holds at least `size` tokens and is requested before the present one runs out, so that no step waits for a
    commit. A client belongs to one event loop. A process that dies without `settle` leaves its leases charged in full.

    Args:
        budget: the budget actor.
        size: tokens of a lease; more where steps need more.
        recall: asks the other holders of leases to return what they do not use, and waits until they have.
    """

    def __init__(self, budget: ActorHandle, size: int = 256, recall: Recall = _nobody) -> None:
        if size < 1:
            raise ValueError(f"a lease is over at least 1 token, not {size}")
        self._budget = budget
        self._size = size
        self._recall = recall
        self._event: Event | None = None
        self._leases: deque[_Lease] = deque()
        self._arriving: asyncio.Task[int] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self._open: bool | None = None

    @property
    def available(self) -> int:
        """Tokens that can be reserved without a request to the budget."""
        return sum(lease.left for lease in self._leases)

    @asynccontextmanager
    async def reserve(self, event: Event, count: int, upcoming: int | None = None) -> AsyncIterator[Reservation]:
        """Reserve up to `count` tokens at the cost of `event`. Tokens that are not released by the end go back.

        A change of event returns what is left under the one before. Being cancelled loses nothing.

        Args:
            upcoming: how many tokens can be needed from now on, at most: no lease is larger.

        Raises:
            LedgerError, ray.exceptions.RayError: no charge could be made; nothing may be released.
        """
        if count < 0:
            raise ValueError(f"cannot reserve {count} tokens")
        if event.measured:
            yield Reservation(count if await self._is_open() else 0, lambda losses: self._charge(event, losses))
            return
        taken = await self._take(event, count, upcoming)
        reservation = Reservation(sum(tokens for _, tokens in taken), lambda losses: self._charge(event, losses))
        try:
            yield reservation
        finally:
            self._end(taken, reservation.released)

    async def settle(self) -> None:
        """Return everything that is not reserved: when the process ends, or when it idles while others starve."""
        async with self._lock:
            if self._arriving:
                await asyncio.wait([self._arriving])
            await self.return_unused()

    async def return_unused(self) -> None:
        """Close the present leases; returns when the ledger has what was not used, reservations awaited.

        Others call this while `reserve` waits for them, so it takes no lock.
        """
        while self._leases:
            self._close(self._leases.popleft())
        if self._closing:
            await asyncio.wait(set(self._closing))

    async def _take(self, event: Event, count: int, upcoming: int | None) -> list[tuple[_Lease, int]]:
        async with self._lock:
            if event != self._event:
                await self._change(event)
            size = max(self._size, STEPS_AHEAD * count)
            recalled = False
            while (missing := count - self.available) > 0:
                wanted = size if upcoming is None else min(size, upcoming - self.available)
                if await asyncio.shield(self._request(event, max(missing, wanted))):
                    continue
                if recalled:
                    break
                await self._recall()
                recalled = True
            taken = self._spend(min(count, self.available))
            left = self.available
            needed = size if upcoming is None else min(size, upcoming - count - left)
            if needed > 0 and (2 * left < self._size or left < STEPS_AHEAD * count):
                self._request(event, needed)
        return taken

    async def _change(self, event: Event) -> None:
        if self._arriving:
            await asyncio.wait([self._arriving])
        await self.return_unused()
        self._event = event

    def _request(self, event: Event, wanted: int) -> "asyncio.Task[int]":
        if self._arriving is None:
            self._arriving = asyncio.create_task(self._fetch(event, wanted))
            self._arriving.add_done_callback(_retrieve)
        return self._arriving

    async def _fetch(self, event: Event, wanted: int) -> int:
        try:
            # Named by us, so that Ray may send it again to a restarted actor and no second lease is made.
            grant: Grant = await self._budget.lease.remote(event.to_json(), wanted, uuid4().hex, tracing.traceparent())
        finally:
            self._arriving = None
        if grant.count:
            self._leases.append(_Lease(grant.lease, grant.count))
        return grant.count

    def _spend(self, count: int) -> list[tuple[_Lease, int]]:
        taken = []
        for lease in self._leases:
            tokens = min(count, lease.left)
            if tokens:
                lease.reserve(tokens)
                taken.append((lease, tokens))
                count -= tokens
        return taken

    def _end(self, taken: Sequence[tuple[_Lease, int]], released: int) -> None:
        for lease, reserved in taken:
            tokens = min(reserved, released)
            released -= tokens
            lease.release(reserved, tokens)
        while self._leases and self._leases[0].released == self._leases[0].count:
            self._close(self._leases.popleft())

    def _close(self, lease: _Lease) -> None:
        """Settle a lease from which nothing can be reserved any more; one that is used up, for the record alone."""
        closing = asyncio.create_task(self._settle(lease))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _settle(self, lease: _Lease) -> None:
        if lease.reserved:
            await lease.unreserved.wait()
        try:
            await self._budget.settle.remote(lease.name, lease.released)
        except (LedgerError, LeaseRefused, RayError) as error:
            _log.warning("lease %s stays charged, %d tokens too many: %s", lease.name, lease.left, error)

    async def _is_open(self) -> bool:
        """Whether there may be budget left. A client that was granted fewer than it charged stays closed."""
        if self._open is None:
            self._open = not await self._budget.stopped.remote()
        return self._open

    async def _charge(self, event: Event, losses: Sequence[Sequence[float]]) -> int:
        # Named by us, so that Ray may send it again to a restarted actor and nothing is charged twice.
        trace = tracing.traceparent()
        granted: int = await self._budget.charge.remote(event.to_json(), losses, uuid4().hex, trace)
        self._open = granted == len(losses)
        return granted


def _retrieve(task: "asyncio.Task[int]") -> None:
    """Marks a failure that nobody awaits as seen; the next request that needs the tokens meets it again."""
    if not task.cancelled():
        task.exception()
