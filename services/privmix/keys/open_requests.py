"""Owns the requests that are admitted or wait: within their shares, in the order of a fair queue."""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from privmix.foundation.errors import KeysUnavailable
from privmix.foundation.retrying import repeated
from privmix.keys.fair_queue import FairQueue
from privmix.keys.grouping import DATABASE_TIMEOUT_S, GroupedTransactions
from privmix.keys.messages import AdmissionLimits, Admitted, Identity, Refused
from privmix.keys.reservations import Reservation, reserve, settle

RETRY_S = 1.0
OVERLOADED = Refused("overloaded", retry_after_s=1.0)

logger = logging.getLogger(__name__)


@dataclass
class _Request:
    """Holds a request between `admit` and `settle`.

    Attributes:
        task: the task in which the request waits; None once it is admitted.
        started: whether its generations have places in the queue.
        reserves: whether it may hold tokens of its key's share.
    """

    key: str
    generations: int
    gateway: str
    task: "asyncio.Task[object] | None" = None
    started: bool = False
    reserves: bool = True


class OpenRequests:
    """Admits requests fairly within their shares, and returns the tokens that they do not use.

    Reservations are in the database, so a restarted actor continues from there.

    Attributes:
        queue: the requests that wait for capacity. Its limits come with the first request.
    """

    def __init__(self, transactions: GroupedTransactions, admitted: Iterable[Reservation]) -> None:
        """`admitted`: the requests that a previous actor admitted."""
        self.queue = FairQueue(AdmissionLimits(0, 0))
        self._transactions = transactions
        self._settling: set[asyncio.Task[None]] = set()
        self._waiting: Counter[str] = Counter()
        self._settled: dict[str, asyncio.Event] = {}
        self._requests: dict[str, _Request] = {}
        for open_ in admitted:
            self._requests[open_.id] = _Request(open_.key, open_.generations, open_.gateway, started=True)
            self.queue.restore(open_.key, open_.generations)

    async def admit(
        self, id_: str, identity: Identity, limits: AdmissionLimits, wanted: int, generations: int, gateway: str
    ) -> Admitted | Refused:
        """Charges a request to its key's share and returns when it may start.

        A request waits while other requests hold the rest of its share, and while the service is full. It gets fewer
        tokens than `wanted` only if its share has no more and no other request holds any of it.

        Args:
            id_: identifies the request in `settle`.
            limits: the limits of the service.
        """
        self.queue.limits = limits
        if id_ in self._requests:  # Ray repeats a call after it has restarted the actor.
            return await self._reserve(id_, wanted)
        if refused := self._exceeds_streams(identity, limits, generations):
            return refused
        request = _Request(identity.id, generations, gateway, asyncio.current_task())
        self._requests[id_] = request
        try:
            outcome = await self._reserve(id_, wanted)
            if isinstance(outcome, Admitted):
                request.started = await self.queue.acquire(request.key, generations)
            if not request.started:
                await self._end(id_, 0)
                return outcome if isinstance(outcome, Refused) else OVERLOADED
        except BaseException:
            await asyncio.shield(self._end(id_, 0))
            raise
        request.task = None
        return outcome

    async def settle(self, id_: str, used: int | None) -> None:
        """Ends a request that used `used` tokens. If None, all its reserved tokens stay charged.

        A request that still waits for admission is cancelled.
        """
        request = self._requests.get(id_)
        if request is not None and request.task is not None:
            request.task.cancel()
            await asyncio.wait((request.task,))
        await self._end(id_, used)

    def gateways(self) -> set[str]:
        """Returns the gateways that requests came from."""
        return {request.gateway for request in self._requests.values()}

    async def settle_lost(self, gateways: Collection[str]) -> None:
        """Ends the requests of gateways that are gone. Their reserved tokens stay charged."""
        for id_, request in list(self._requests.items()):
            if request.gateway in gateways:
                await self.settle(id_, None)

    def _exceeds_streams(self, identity: Identity, limits: AdmissionLimits, generations: int) -> Refused | None:
        """Refuses a request with more generations than its key may have live: ever, or now."""
        own = identity.live_streams
        most = limits.largest_request if own is None else min(own, limits.largest_request)
        if generations > most:
            return Refused("request_too_large", most)
        live = sum(request.generations for request in self._requests.values() if request.key == identity.id)
        return None if own is None or live + generations <= own else Refused("live_streams", own)

    async def _reserve(self, id_: str, wanted: int) -> Admitted | Refused:
        request = self._requests[id_]
        key = request.key
        while True:
            # The event must exist before the share is read, so that no change in between is missed.
            settled = self._settled.setdefault(key, asyncio.Event())
            request.reserves = True
            outcome = await self._transactions.run(
                lambda connection: reserve(connection, id_, key, wanted, request.generations, request.gateway)
            )
            if isinstance(outcome, int):
                return Admitted(outcome)
            request.reserves = False
            if not outcome.held:
                return Refused("share_exhausted")
            # A request that waits for its share occupies this actor, as one in the queue does.
            if self._waiting[key] >= max(1, self.queue.limits.max_waiting_of_key):
                return OVERLOADED
            self._waiting[key] += 1
            try:
                await settled.wait()
            finally:
                self._waiting[key] -= 1

    async def _end(self, id_: str, used: int | None) -> None:
        """Releases everything that a request holds, and settles its reservation. Idempotent.

        If the database does not answer in time, it is settled later.
        """
        request = self._requests.pop(id_, None)
        if request is not None and request.started:
            self.queue.free(request.key, request.generations)
        key = request.key if request is not None and request.reserves else None
        settling = asyncio.get_running_loop().create_task(self._settle(id_, used, key))
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)
        await asyncio.wait((settling,), timeout=DATABASE_TIMEOUT_S)

    async def _settle(self, id_: str, used: int | None, key: str | None) -> None:
        """Settles a reservation, and tries until the database answers. Wakes those that wait for tokens of `key`.

        A repeated try finds no reservation if one before it was committed and not confirmed.
        """
        await repeated(
            lambda: self._transactions.run(lambda connection: settle(connection, id_, used)),
            KeysUnavailable,
            RETRY_S,
            log=lambda error: logger.warning("a request is settled later: %s", error),
        )
        if key is not None and (event := self._settled.pop(key, None)):
            event.set()
