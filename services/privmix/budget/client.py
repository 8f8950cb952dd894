"""Implements the coordinator's client of the budget: a token is charged durably before it is released."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from ray.actor import ActorHandle
from ray.exceptions import RayError

from privmix.budget.accounts import Grains
from privmix.budget.ledger import Grant
from privmix.foundation.errors import LeaseRefused, LedgerError, LedgerMissing, LedgerUnavailable
from privmix.foundation.retrying import repeated
from privmix.privacy.events import Event

STEPS_AHEAD = 2
"""The number of steps that a lease covers at least, and how many steps ahead the next lease is requested."""

SETTLE_S = 60.0
"""How long a settlement is repeated while the database does not answer. Below `coordinator.recovery_s`."""
RETRY_S = 0.5

logger = logging.getLogger(__name__)

Recall = Callable[[], Awaitable[None]]


async def _no_recall() -> None:
    """Does nothing: there are no other clients."""


@dataclass(eq=False)
class _Lease:
    name: str
    count: int
    allowances: Grains = ()
    released: int = 0
    reserved: int = 0
    charges: Grains = ()
    unreserved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def left(self) -> int:
        return self.count - self.released - self.reserved

    def reserve(self, count: int) -> None:
        self.reserved += count
        self.unreserved.clear()

    def end(self, reserved: int, released: int, charges: Sequence[Grains] = ()) -> None:
        """Ends a reservation of `reserved` tokens, of which `released` were released at these charges."""
        self.reserved -= reserved
        self.released += released
        self.charges = tuple(map(sum, zip(*charges, self.charges or (0,) * len(self.allowances), strict=True)))
        if not self.reserved:
            self.unreserved.set()


class Reservation:
    """Allows a number of tokens to be computed. "Released" is what is sampled; other tokens go back to the budget.

    Attributes:
        count: the number of tokens; less than requested if the budget is used up.
        released: the number of tokens that are sampled so far, whether or not a client gets them.
        allowances: what each token may charge to each part's account, for an event with accounts.
        charges: what the released tokens charge, by the index of the token.
    """

    def __init__(
        self,
        count: int,
        charge: Callable[[Sequence[Sequence[float]]], Awaitable[int]],
        allowances: Sequence[Grains] = (),
    ) -> None:
        self.count = count
        self.released = 0
        self.allowances = allowances
        self.charges: dict[int, Grains] = {}
        self._charge = charge

    async def charge(self, losses: Sequence[Sequence[float]]) -> int:
        """Charges measured losses durably and returns how many of the first tokens may be sampled.

        Args:
            losses: the losses of each token (`Ledger.charge`); empty for an event of fixed cost, which the lease has
                charged already.

        Raises:
            LedgerError, ray.exceptions.RayError: no token may be sampled.
        """
        return await self._charge(losses) if losses else self.count

    def mark_released(self, count: int) -> None:
        """Records that `count` tokens are sampled next: call it before, so that they stay charged whatever happens."""
        if not 0 <= self.released + count <= self.count:
            raise ValueError(f"cannot release {count} more tokens of {self.count} with {self.released} released")
        self.released += count

    def mark_charged(self, charges: Mapping[int, Grains]) -> None:
        """Records that tokens, given by their index, are sampled next, and what they charge to each part's account.

        Raises:
            ValueError: a token is unknown or was released before, or its charges exceed its allowances.
        """
        for token, own in charges.items():
            if not 0 <= token < self.count or token in self.charges:
                raise ValueError(f"token {token} of {self.count} cannot be released")
            if len(own) != len(self.allowances[token]) or any(map(int.__gt__, own, self.allowances[token])):
                raise ValueError(f"the charges of token {token} exceed its allowances")
            self.charges[token] = own
        self.mark_released(len(charges))


class BudgetClient:
    """Reserves tokens of fixed cost from leases, and charges tokens of measured cost before their release.

        client = BudgetClient(ray.get_actor(NAME, namespace))
        async with client.reserve(event, len(sequences)) as reserved:
            ...                                      # compute at most `reserved.count` tokens
            granted = await reserved.charge(losses)  # at most this many of the first tokens may be sampled
            reserved.mark_released(granted)          # and then sample them
        await client.settle()                        # before this process ends

    The client requests the next lease before the current one runs out, so that no step waits for a commit. A client
    belongs to one event loop. If a process dies without `settle`, its leases stay charged in full.

    A request that fails may have charged its lease nevertheless: the ledger's commit was not confirmed. The client is
    the only one that knows the lease's name. It repeats the request by that name, or returns the lease.

    Args:
        budget: the budget actor.
        size: the minimum number of tokens in a lease. Steps that need more get more.
        recall: makes the other clients return their unused leases, and waits for them.
    """

    def __init__(self, budget: ActorHandle, size: int = 256, recall: Recall = _no_recall) -> None:
        if size < 1:
            raise ValueError(f"a lease holds at least 1 token, not {size}")
        self._budget = budget
        self._size = size
        self._recall = recall
        self._event: Event | None = None
        self._parts: int | None = None
        self._leases: deque[_Lease] = deque()
        # The event and the parts of leases by name that may be granted, and are neither being requested nor returned.
        self._unanswered: dict[str, tuple[Event, int | None]] = {}
        self._arriving: asyncio.Task[int] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self._open: bool | None = None

    @property
    def available(self) -> int:
        """The number of tokens that can be reserved without a request to the budget actor."""
        return sum(lease.left for lease in self._leases)

    @asynccontextmanager
    async def reserve(
        self, event: Event, count: int, upcoming: int | None = None, parts: int | None = None
    ) -> AsyncIterator[Reservation]:
        """Reserves up to `count` tokens at the cost of `event`. Returns the tokens that the block does not release.

        A new event first returns the leases of the previous event. A cancellation loses no tokens.

        Args:
            upcoming: an upper bound of the tokens needed from now on. It limits the size of leases.
            parts: the number of parts that are served, for an event with accounts.

        Raises:
            LedgerError, ray.exceptions.RayError: the charge failed. No token may be released.
        """
        if count < 0:
            raise ValueError(f"cannot reserve {count} tokens")
        if event.measured:
            yield Reservation(count if await self._is_open() else 0, lambda losses: self._charge(event, losses))
            return
        taken = await self._take(event, count, upcoming, parts if event.accounts else None)
        reservation = Reservation(
            sum(tokens for _, tokens in taken),
            lambda losses: self._charge(event, losses),
            [lease.allowances for lease, tokens in taken for _ in range(tokens)] if event.accounts else (),
        )
        try:
            yield reservation
        finally:
            self._end(taken, reservation)

    async def settle(self) -> None:
        """Returns all tokens that are not reserved. Call it before the process ends or becomes idle."""
        async with self._lock:
            if self._arriving:
                await asyncio.wait([self._arriving])
            await self.return_unused()

    async def return_unused(self) -> None:
        """Closes all leases and waits for open reservations, until the ledger has all unused tokens.

        It takes no lock, because other clients call it while `reserve` holds the lock and waits for them.
        """
        while self._leases:
            self._close(self._leases.popleft())
        while self._unanswered:
            self._end_in_background(self._return_unanswered(*self._unanswered.popitem()))
        if self._closing:
            await asyncio.wait(set(self._closing))

    async def _take(
        self, event: Event, count: int, upcoming: int | None, parts: int | None
    ) -> list[tuple[_Lease, int]]:
        async with self._lock:
            if (event, parts) != (self._event, self._parts):
                await self._change(event, parts)
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

    async def _change(self, event: Event, parts: int | None) -> None:
        if self._arriving:
            await asyncio.wait([self._arriving])
        await self.return_unused()
        self._event, self._parts = event, parts

    def _request(self, event: Event, wanted: int) -> "asyncio.Task[int]":
        if self._arriving is None:
            self._arriving = asyncio.create_task(self._fetch(event, wanted))
            self._arriving.add_done_callback(_retrieve)
        return self._arriving

    async def _fetch(self, event: Event, wanted: int) -> int:
        asked = event, self._parts
        try:
            for name in [name for name, before in self._unanswered.items() if before == asked]:
                if self._unanswered.pop(name, None):  # otherwise it is being returned
                    with suppress(LeaseRefused):  # it was granted and is settled
                        return await self._lease(name, asked, wanted)
            return await self._lease(uuid4().hex, asked, wanted)
        finally:
            self._arriving = None

    async def _lease(self, name: str, asked: tuple[Event, int | None], wanted: int) -> int:
        """Requests a lease. The name makes the call idempotent: Ray may repeat it after a restart of the actor."""
        event, parts = asked
        try:
            grant: Grant = await self._budget.lease.remote(event.to_json(), wanted, name, parts)
        except LeaseRefused:
            raise
        except BaseException:
            self._unanswered[name] = asked
            raise
        if grant.count:
            self._leases.append(_Lease(grant.lease, grant.count, grant.allowances))
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

    def _end(self, taken: Sequence[tuple[_Lease, int]], reservation: Reservation) -> None:
        first, released = 0, reservation.released
        for lease, reserved in taken:
            if lease.allowances:  # each token charges the lease whose allowance it had
                own = [charges for token, charges in reservation.charges.items() if first <= token < first + reserved]
                lease.end(reserved, len(own), own)
                first += reserved
                continue
            tokens = min(reserved, released)
            released -= tokens
            lease.end(reserved, tokens)
        while self._leases and self._leases[0].released == self._leases[0].count:
            self._close(self._leases.popleft())

    def _close(self, lease: _Lease) -> None:
        """Settles a lease in the background. The caller has removed it, so nothing more is reserved from it."""
        self._end_in_background(self._settle(lease))

    def _end_in_background(self, ending: Coroutine[Any, Any, None]) -> None:
        closing = asyncio.create_task(ending)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _settle(self, lease: _Lease) -> None:
        """Settles a lease once nothing is reserved from it."""
        if lease.reserved:
            await lease.unreserved.wait()
        charges = lease.charges or (0,) * len(lease.allowances)
        try:
            await self._settle_in_time(lease.name, lease.released, charges)
        except (LedgerError, LeaseRefused, RayError) as error:
            logger.warning("lease %s stays charged, with %d unused tokens: %s", lease.name, lease.left, error)

    async def _return_unanswered(self, name: str, asked: tuple[Event, int | None]) -> None:
        """Settles a lease without used tokens, if it was granted. Keeps the name while that is unknown."""
        try:
            await self._settle_in_time(name, 0, (0,) * (asked[1] or 0))
        except LeaseRefused:  # it was never granted, or it is settled
            return
        except (LedgerError, RayError) as error:
            self._unanswered[name] = asked
            logger.warning("lease %s may stay charged until this client settles again: %s", name, error)

    async def _settle_in_time(self, name: str, used: int, charges: Grains) -> None:
        """Settles a lease. A database that is away may return within `SETTLE_S`."""
        await repeated(
            lambda: self._budget.settle.remote(name, used, charges),
            (LedgerUnavailable, LedgerMissing),
            RETRY_S,
            patience_s=SETTLE_S,
        )

    async def _is_open(self) -> bool:
        """Returns whether budget may be left. A client whose charge was cut short stays closed."""
        if self._open is None:
            self._open = not await self._budget.stopped.remote()
        return self._open

    async def _charge(self, event: Event, losses: Sequence[Sequence[float]]) -> int:
        # The name makes the call idempotent: Ray may repeat it after a restart of the actor. A repeated step has
        # another name: it computes its tokens and their losses anew, and a charge for other losses must not pay for
        # them. So a charge that was not confirmed is lost: the tokens of one step.
        granted: int = await self._budget.charge.remote(event.to_json(), losses, uuid4().hex)
        self._open = granted == len(losses)
        return granted


def _retrieve(task: "asyncio.Task[int]") -> None:
    """Retrieves a task's exception so that asyncio does not log it. A later request raises it if it persists."""
    if not task.cancelled():
        task.exception()
