"""A coordinator's change purse: tokens whose charge is durable already, so that releasing one waits for nothing."""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from uuid import uuid4

from ray.actor import ActorHandle
from ray.exceptions import RayError

from services import tracing
from services.budget.errors import LeaseRefused, LedgerError
from services.budget.ledger import Grant
from services.privacy.events import Event

_log = logging.getLogger(__name__)


@dataclass
class _Held:
    lease: str
    count: int
    used: int = 0

    @property
    def left(self) -> int:
        return self.count - self.used


class Purse:
    """Leases `size` tokens at a time, the next ones while half of these are left.

        purse = Purse(ray.get_actor(NAME, namespace))
        granted = await purse.take(event, len(sequences))  # release at most so many tokens
        ...
        await purse.settle()  # before this process ends

    A purse belongs to one event loop. A process that dies without `settle` leaves its leases charged in full.
    """

    def __init__(self, budget: ActorHandle, size: int = 256) -> None:
        if size < 1:
            raise ValueError(f"a purse leases at least 1 token at a time, not {size}")
        self._budget = budget
        self._size = size
        self._event: Event | None = None
        self._leases: deque[_Held] = deque()
        self._arriving: asyncio.Task[int] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    @property
    def available(self) -> int:
        """Tokens that can be released without asking."""
        return sum(held.left for held in self._leases)

    async def take(self, event: Event, count: int) -> int:
        """Permission to release up to `count` tokens at the cost of `event`; fewer mean that the budget is used up.

        A change of event hands back what is left under the one before. Being cancelled loses nothing.

        Raises:
            LedgerError, ray.exceptions.RayError: no charge could be made; nothing may be released.
        """
        if count < 0:
            raise ValueError(f"cannot take {count} tokens")
        async with self._lock:
            if event != self._event:
                await self._hand_back()
                self._event = event
            while (missing := count - self.available) > 0:
                if not await asyncio.shield(self._order(event, missing)):
                    break
            taken = self._spend(min(count, self.available))
            if 2 * self.available < self._size:
                self._order(event)
        return taken

    async def settle(self) -> None:
        """Hands back all that was not taken: when the process ends, or when it idles while others starve."""
        async with self._lock:
            await self._hand_back()

    def _order(self, event: Event, missing: int = 0) -> "asyncio.Task[int]":
        if self._arriving is None:
            self._arriving = asyncio.create_task(self._fetch(event, max(self._size, missing)))
            self._arriving.add_done_callback(_retrieve)
        return self._arriving

    async def _fetch(self, event: Event, wanted: int) -> int:
        try:
            # Named by us, so that Ray may send it again to a restarted actor and no second lease is made.
            grant: Grant = await self._budget.lease.remote(event.to_json(), wanted, uuid4().hex, tracing.traceparent())
        finally:
            self._arriving = None
        if grant.count:
            self._leases.append(_Held(grant.lease, grant.count))
        return grant.count

    def _spend(self, count: int) -> int:
        remaining = count
        while remaining:
            held = self._leases[0]
            used = min(remaining, held.left)
            held.used += used
            remaining -= used
            if not held.left:
                self._close(self._leases.popleft())
        return count

    async def _hand_back(self) -> None:
        if self._arriving:
            await asyncio.wait([self._arriving])
        while self._leases:
            self._close(self._leases.popleft())
        if self._closing:
            await asyncio.wait(self._closing)

    def _close(self, held: _Held) -> None:
        """Settles a lease of which nothing can be taken any more; one that is used up, for the books alone."""
        closing = asyncio.create_task(self._settle(held))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _settle(self, held: _Held) -> None:
        try:
            await self._budget.settle.remote(held.lease, held.used)
        except (LedgerError, LeaseRefused, RayError) as error:
            _log.warning("lease %s stays charged, %d tokens too many: %s", held.lease, held.left, error)


def _retrieve(task: "asyncio.Task[int]") -> None:
    """Takes note of a failure that nobody waits for; whoever needs the tokens will ask again and see it."""
    if not task.cancelled():
        task.exception()
