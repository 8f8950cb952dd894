"""Owns the requests that are admitted or wait: within their shares, in the order of a fair queue."""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import timedelta

from privmix.database.clock import now
from privmix.database.deadline import DATABASE_TIMEOUT_S
from privmix.foundation.errors import KeysUnavailable
from privmix.foundation.retrying import repeated
from privmix.keys.fair_queue import FairQueue, QueueFull
from privmix.keys.grouping import GroupedTransactions
from privmix.keys.messages import AdmissionLimits, Admitted, Identity, Refused
from privmix.keys.reservations import Reservation, reserve, settle

RETRY_S = 1.0
OVERLOADED = Refused("overloaded", retry_after_s=1.0)

logger = logging.getLogger(__name__)


@dataclass
class _Request:
    """Holds a request between `admit` and `settle`.

    Attributes:
        queue: None if a previous actor admitted the request and no request has come since.
        task: the task in which the request waits; None once it is admitted.
        entering: the tasks that wait for places of further generations.
        places: the number of its generations that have places in the queue.
    """

    key: str
    generations: int
    gateway: str
    queue: FairQueue | None = None
    task: "asyncio.Task[object] | None" = None
    entering: "set[asyncio.Task[object]]" = field(default_factory=set)
    places: int = 0


class OpenRequests:
    """Admits requests fairly within their shares, and returns the tokens that they do not use.

    Reservations are in the database, so a restarted actor continues from there.
    """

    def __init__(self, transactions: GroupedTransactions, admitted: Iterable[Reservation]) -> None:
        """`admitted`: the requests that a previous actor admitted."""
        self._transactions = transactions
        self._settling: set[asyncio.Task[None]] = set()
        self._waiting: Counter[str] = Counter()
        self._queues: dict[AdmissionLimits, FairQueue] = {}
        self._settled: dict[str, asyncio.Event] = {}
        self._requests = {open_.id: _Request(open_.key, open_.generations, open_.gateway) for open_ in admitted}

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
        first = min(generations, limits.piece)
        queue = self._queue_for(limits)
        if id_ in self._requests:  # Ray repeats a call after it has restarted the actor.
            before = await self._reserve(id_, wanted)
            return before if isinstance(before, Refused) else Admitted(before, first)
        if refused := self._exceeds_streams(identity, generations):
            return refused
        request = _Request(identity.id, generations, gateway, queue, asyncio.current_task())
        self._requests[id_] = request
        try:
            reserved = await self._reserve(id_, wanted)
            if isinstance(reserved, Refused):
                await self._end(id_, 0)
                return reserved
            await self._start(request, first)
        except QueueFull:
            await self._end(id_, 0)
            return OVERLOADED
        except BaseException:
            await asyncio.shield(self._end(id_, 0))
            raise
        request.task = None
        return Admitted(reserved, first)

    async def enter(self, id_: str, generations: int) -> None:
        """Returns when further generations of an admitted request may start, or when the request has ended."""
        request, task = self._requests.get(id_), asyncio.current_task()
        if request is None or request.queue is None or task is None:
            return
        request.entering.add(task)
        try:
            await self._start(request, generations, unlimited=True)
        finally:
            request.entering.discard(task)

    async def leave(self, id_: str, generations: int) -> None:
        """Gives up the places of generations that have ended while others of the request continue."""
        if request := self._requests.get(id_):
            self._leave(request, generations)

    async def settle(self, id_: str, used: int | None) -> None:
        """Ends a request that used `used` tokens. If None, all its reserved tokens stay charged.

        A request that still waits for admission is cancelled.
        """
        request = self._requests.get(id_)
        waiting = () if request is None else (*filter(None, (request.task,)), *request.entering)
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)
        await self._end(id_, used)

    def gateways(self) -> set[str]:
        """Returns the gateways that requests came from."""
        return {request.gateway for request in self._requests.values()}

    async def settle_lost(self, gateways: Collection[str]) -> None:
        """Ends the requests of gateways that are gone. Their reserved tokens stay charged."""
        for id_, request in list(self._requests.items()):
            if request.gateway in gateways:
                await self.settle(id_, None)

    @property
    def waiting(self) -> int:
        """How many generations wait in the queue."""
        return sum(queue.waiting for queue in self._queues.values())

    def _exceeds_streams(self, identity: Identity, generations: int) -> Refused | None:
        """Refuses a request whose share allows fewer live streams: ever, or now."""
        limit = identity.live_streams
        if limit is None:
            return None
        if generations > limit:
            return Refused("more_than_live_streams", limit)
        live = sum(request.generations for request in self._requests.values() if request.key == identity.id)
        return Refused("live_streams", limit) if live + generations > limit else None

    async def _reserve(self, id_: str, wanted: int) -> int | Refused:
        request = self._requests[id_]
        key = request.key
        # A request that waits for its share occupies this actor, as one in the queue does.
        limit = max(1, request.queue.max_waiting_of_key) if request.queue else 1
        while True:
            # The event must exist before the share is read, so that no change in between is missed.
            settled = self._settled.setdefault(key, asyncio.Event())
            outcome = await self._transactions.run(
                lambda connection: reserve(connection, id_, key, wanted, request.generations, request.gateway)
            )
            if isinstance(outcome, int):
                return outcome
            if not outcome.held:
                if outcome.limit == "tokens_per_day":
                    return Refused("daily_share_exhausted", retry_after_s=_seconds_until_midnight())
                return Refused("share_exhausted")
            if self._waiting[key] >= limit:
                return OVERLOADED
            self._waiting[key] += 1
            try:
                await settled.wait()
            finally:
                self._waiting[key] -= 1

    def _queue_for(self, limits: AdmissionLimits) -> FairQueue:
        """Returns the queue of a deployment. A new one has the requests that a previous actor admitted."""
        if limits not in self._queues:
            queue = FairQueue(limits.capacity, limits.max_waiting, limits.max_waiting_of_key)
            self._queues[limits] = queue
            for request in self._requests.values():
                if request.queue is None:
                    request.queue, request.places = queue, min(request.generations, limits.piece)
                    queue.restore(request.key, request.places)
        return self._queues[limits]

    @staticmethod
    async def _start(request: _Request, generations: int, *, unlimited: bool = False) -> None:
        """Waits until the queue lets generations of the request start."""
        assert request.queue is not None
        await request.queue.acquire(request.key, generations, unlimited=unlimited)
        request.places += generations

    @staticmethod
    def _leave(request: _Request, generations: int) -> None:
        ended = min(generations, request.places)
        request.places -= ended
        if ended and request.queue is not None:
            request.queue.free(request.key, ended)

    async def _end(self, id_: str, used: int | None) -> None:
        """Releases everything that a request holds, and settles its reservation. Idempotent.

        If the database does not answer in time, it is settled later.
        """
        request = self._requests.pop(id_, None)
        if request is not None:
            self._leave(request, request.places)
        settling = asyncio.get_running_loop().create_task(self._settle(id_, used))
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)
        await asyncio.wait((settling,), timeout=DATABASE_TIMEOUT_S)

    async def _settle(self, id_: str, used: int | None) -> None:
        """Settles a reservation, and tries until the database answers. Wakes the requests that wait for its tokens."""
        key = await repeated(
            lambda: self._transactions.run(lambda connection: settle(connection, id_, used)),
            KeysUnavailable,
            RETRY_S,
            log=lambda error: logger.warning("a request is settled later: %s", error),
        )
        if key is not None and (event := self._settled.pop(key, None)):
            event.set()


def _seconds_until_midnight() -> float:
    """Returns the seconds until midnight UTC, when daily shares start again."""
    time_ = now()
    midnight = (time_ + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    return (midnight - time_).total_seconds()
