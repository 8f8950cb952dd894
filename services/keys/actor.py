"""Implements the Ray actor that identifies API keys, admits their requests and charges their shares."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, TypeVar

import ray
from ray.actor import ActorHandle

from services.keys.database import Database
from services.keys.fair_queue import FairQueue, QueueFull
from services.keys.messages import AdmissionLimits, Admitted, Identity, InvalidKey, Refused, TrafficUpdate
from services.keys.metrics import ShareMetrics
from services.keys.rate_limiter import RateLimiter
from services.keys.records import Key, KeyAccount, KeysUnavailable, Scope, Share, now
from services.keys.store import Exhausted, KeyStore, Reserved
from services.keys.subjects import charged_subjects, ensemble_of, group_subject, subjects_of
from services.keys.traffic import Traffic, TrafficReport

NAME = "keys"
WATCH_S = 5.0
HEARTBEAT_TIMEOUT_S = 60.0
"""A gateway without a heartbeat for this long is considered gone. The tokens that its requests held stay charged."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass
class _Request:
    """Holds a request between `admit` and `settle`.

    Attributes:
        queue: None if a previous actor admitted the request and its ensemble has had no other request since.
        task: the task in which the request waits; None once it is admitted.
        started: whether the request has its place in the queue.
        counted: whether it counts as live streams of its shares. A background request counts only once it has started.
    """

    subjects: tuple[str, ...]
    generations: int
    gateway: str
    queue: FairQueue | None = None
    task: "asyncio.Task[object] | None" = None
    background: bool = False
    started: bool = False
    counted: bool = False


class Keys:
    """Identifies keys, admits requests fairly within their shares, and returns unused tokens to the shares.

    Shares and usage are in the database, so a restarted actor continues from there. Rate limits are in memory and start
    full after a restart. Each ensemble has a queue of its own.
    """

    def __init__(self, database: str) -> None:
        self._store = KeyStore(Database(database))
        self._transaction = asyncio.Lock()
        self._queues: dict[AdmissionLimits, FairQueue] = {}
        self._rate_limiter = RateLimiter()
        self._traffic = Traffic()
        self._metrics = ShareMetrics()
        self._requests: dict[str, _Request] = {}
        self._live_streams: Counter[str] = Counter()
        self._share_changed: dict[str, asyncio.Event] = {}
        self._heartbeats: dict[str, float] = {}
        for open_ in self._store.open_reservations():  # requests that a previous actor admitted
            self._add(open_.id, _Request(open_.subjects, open_.generations, open_.gateway, started=True))
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def ready(self) -> None:
        """Returns when the database is open."""

    async def identify(self, hash_: str | None) -> Identity | InvalidKey:
        """Returns the identity of the key whose secret has this hash."""
        key = await self._do(lambda: self._store.find(hash_)) if hash_ else None
        if key is None:
            return InvalidKey("unknown", required=await self._do(self._store.required))
        return _identity(key)

    async def identity(self, id_: str) -> Identity | InvalidKey:
        """Returns the identity of the key with this id, for work that continues after its client has left.

        Raises:
            UnknownKey: no key has this id.
        """
        return _identity((await self.account(id_)).key)

    async def admit(
        self,
        id_: str,
        subjects: Sequence[str],
        limits: AdmissionLimits,
        wanted: int,
        generations: int,
        gateway: str,
        background: bool = False,
    ) -> Admitted | Refused:
        """Charges a request to its shares and returns when it may start.

        A request waits while other requests hold the rest of its share, and while the service is full. It gets fewer
        tokens than `wanted` only if its share has no more and no other request holds any of it.

        Args:
            id_: identifies the request in `settle`.
            subjects: the subjects of the key's shares.
            limits: the limits of the ensemble that serves the request.
            background: let all other requests go first, and hold no tokens while the request waits in the queue.
        """
        subjects = charged_subjects(subjects, limits.shares)
        shares = await self._do(lambda: self._store.shares(subjects))
        if id_ in self._requests:  # Ray repeats a call after it has restarted the actor.
            before = await self._reserve(id_, wanted)
            return before if isinstance(before, Refused) else Admitted(before.tokens, self._rate_limiter.states(shares))
        if refused := self._exceeds_share(shares, wanted, generations):
            return refused
        if not background and (refused := self._exceeds_rates(id_, shares, wanted, generations)):
            return refused
        queue = self._queue_for(limits)
        request = _Request(subjects, generations, gateway, queue, asyncio.current_task(), background)
        self._add(id_, request)
        try:
            if background:
                await self._start(request, queue)
                if refused := self._exceeds_rates(id_, shares, wanted, generations):
                    await self._end(id_, 0)
                    return refused
                self._count(request)
            reserved = await self._reserve(id_, wanted)
            if isinstance(reserved, Refused):
                await self._end(id_, 0)
                return reserved
            if not background:
                await self._start(request, queue)
        except QueueFull:
            await self._end(id_, 0)
            return Refused("overloaded", retry_after_s=1.0)
        except BaseException:
            await asyncio.shield(self._end(id_, 0))
            raise
        request.task = None
        self._rate_limiter.put_back(id_, wanted - reserved.tokens)
        return Admitted(reserved.tokens, self._rate_limiter.states(shares))

    async def settle(self, id_: str, used: int | None) -> None:
        """Ends a request that used `used` tokens. If None, all its reserved tokens stay charged.

        A request that still waits for admission is cancelled.
        """
        request = self._requests.get(id_)
        if request is not None and request.task is not None:
            request.task.cancel()
            await asyncio.wait([request.task])
        await self._end(id_, used)

    async def heartbeat(self, gateway: str, update: TrafficUpdate) -> None:
        """Records that a gateway is alive, and its traffic. Gateways send one about every second."""
        self._heartbeats[gateway] = time.monotonic()
        self._traffic.add(gateway, update)

    async def traffic(self, ensemble: str | None = None) -> TrafficReport:
        """Returns the traffic of all gateways, for one ensemble or for all together."""
        queues = (queue for limits, queue in self._queues.items() if ensemble in (None, limits.ensemble))
        return self._traffic.report(ensemble, waiting=sum(queue.waiting for queue in queues))

    async def accounts(self) -> list[KeyAccount]:
        """See `KeyStore.accounts`."""
        return await self._do(self._store.accounts)

    async def account(self, id_or_name: str) -> KeyAccount:
        """See `KeyStore.account`."""
        return await self._do(lambda: self._store.account(id_or_name))

    async def create(
        self,
        name: str,
        owner: str,
        group: str | None,
        scopes: Sequence[Scope],
        expires: datetime | None,
        share: Share,
    ) -> tuple[Key, str]:
        """See `KeyStore.create`. Returns the key and the text of its secret."""
        key, secret = await self._do(
            lambda: self._store.create(name, owner=owner, group=group, scopes=scopes, expires=expires, share=share)
        )
        return key, secret.text

    async def limit(self, id_or_name: str, share: Share, ensemble: str | None = None) -> KeyAccount:
        """See `KeyStore.limit`."""
        account = await self._do(lambda: self._store.limit(id_or_name, share, ensemble))
        self._wake_waiting(charged_subjects(subjects_of(account.key), ensemble))
        return account

    async def limit_group(self, group: str, share: Share, ensemble: str | None = None) -> None:
        """See `KeyStore.limit_group`."""
        await self._do(lambda: self._store.limit_group(group, share, ensemble))
        self._wake_waiting(charged_subjects((group_subject(group),), ensemble))

    async def rotate(self, id_or_name: str, grace: timedelta) -> tuple[Key, str]:
        """See `KeyStore.rotate`. Returns the key and the text of its secret."""
        key, secret = await self._do(lambda: self._store.rotate(id_or_name, grace))
        return key, secret.text

    async def revoke(self, id_or_name: str) -> Key:
        """See `KeyStore.revoke`. Running requests continue to their end."""
        return await self._do(lambda: self._store.revoke(id_or_name))

    @staticmethod
    def _exceeds_share(shares: dict[str, Share], wanted: int, generations: int) -> Refused | None:
        """Refuses a request that one of its shares can never admit."""
        for share in shares.values():
            if share.largest_request is not None and wanted > share.largest_request:
                return Refused("request_too_large", share.largest_request)
            if share.tokens_per_minute is not None and wanted > share.tokens_per_minute:
                return Refused("larger_than_a_minute", share.tokens_per_minute)
            if share.live_streams is not None and generations > share.live_streams:
                return Refused("more_than_live_streams", share.live_streams)
        return None

    def _exceeds_rates(self, id_: str, shares: dict[str, Share], wanted: int, generations: int) -> Refused | None:
        """Refuses a request that exceeds a limit now, or charges it to the rate limits."""
        for subject, share in shares.items():
            if share.live_streams is not None and self._live_streams[subject] + generations > share.live_streams:
                return Refused("live_streams", share.live_streams)
        return self._rate_limiter.take(id_, shares, wanted)

    async def _reserve(self, id_: str, wanted: int) -> Reserved | Refused:
        request = self._requests[id_]
        while True:
            # The events must exist before the share is read, so that no change in between is missed.
            changed = {
                subject: self._share_changed.setdefault(subject, asyncio.Event()) for subject in request.subjects
            }
            outcome = await self._do(
                lambda: self._store.reserve(id_, request.subjects, wanted, request.generations, request.gateway)
            )
            match outcome:
                case Reserved():
                    return outcome
                case Exhausted(limit="tokens_per_day"):
                    return Refused("daily_share_exhausted", retry_after_s=_seconds_until_midnight())
                case Exhausted():
                    return Refused("share_exhausted")
                case _ if request.background:
                    # A background request already has a place in the queue. The request that holds the share may wait
                    # for that place, so waiting here could deadlock.
                    return Refused("overloaded", retry_after_s=1.0)
                case _:
                    await changed[outcome.subject].wait()

    def _queue_for(self, limits: AdmissionLimits) -> FairQueue:
        """Returns the queue of an ensemble. A new queue contains the requests that a previous actor admitted."""
        if limits not in self._queues:
            queue = self._queues[limits] = FairQueue(limits.capacity, limits.max_waiting)
            for request in self._requests.values():
                if request.queue is None and ensemble_of(request.subjects) == limits.shares:
                    queue.restore(request.subjects[0], request.generations)
                    request.queue = queue
        return self._queues[limits]

    @staticmethod
    async def _start(request: _Request, queue: FairQueue) -> None:
        """Waits until the queue lets the request start."""
        await queue.acquire(request.subjects[0], request.generations, background=request.background)
        request.started = True

    def _add(self, id_: str, request: _Request) -> None:
        self._requests[id_] = request
        self._heartbeats.setdefault(request.gateway, time.monotonic())
        if not request.background:
            self._count(request)

    def _count(self, request: _Request) -> None:
        request.counted = True
        for subject in request.subjects:
            self._live_streams[subject] += request.generations

    async def _end(self, id_: str, used: int | None) -> None:
        """Settles the reservation of a request and releases everything that it holds. Idempotent."""
        settled = await self._do(lambda: self._store.settle(id_, used))
        request = self._requests.pop(id_, None)
        if request is not None:
            for subject in request.subjects if request.counted else ():
                self._live_streams[subject] -= request.generations
            if request.started and request.queue is not None:
                request.queue.release(request.subjects[0], request.generations, background=request.background)
        self._rate_limiter.end(id_, 0 if settled is None else settled.tokens if used is None else used)
        if settled is not None:
            self._wake_waiting(settled.subjects)

    def _wake_waiting(self, subjects: Sequence[str]) -> None:
        """Wakes the requests that wait for tokens of these shares."""
        for subject in subjects:
            if event := self._share_changed.pop(subject, None):
                event.set()

    async def _do(self, work: Callable[[], T]) -> T:
        """Runs a transaction in a thread. The cancellation of a caller does not interrupt it."""

        async def exclusively() -> T:
            async with self._transaction:
                return await asyncio.to_thread(work)

        return await asyncio.shield(asyncio.ensure_future(exclusively()))

    async def _watch(self) -> None:
        """Settles the requests of gateways that are gone, and updates the metrics of the shares."""
        while True:
            await asyncio.sleep(WATCH_S)
            with suppress(KeysUnavailable):
                self._metrics.update(await self.accounts())
            now_s = time.monotonic()
            gone = {gateway for gateway, last_s in self._heartbeats.items() if now_s - last_s > HEARTBEAT_TIMEOUT_S}
            for id_, request in list(self._requests.items()):
                if request.gateway in gone:
                    try:
                        await self.settle(id_, None)
                    except KeysUnavailable as error:
                        _log.warning("%s", error)
            for gateway in gone:
                del self._heartbeats[gateway]


def _identity(key: Key) -> Identity | InvalidKey:
    if not key.valid(now()):
        return InvalidKey("revoked" if key.revoked else "expired")
    return Identity(key.id, key.name, key.scopes, subjects_of(key))


def _seconds_until_midnight() -> float:
    """Returns the seconds until midnight UTC, when daily shares start again."""
    time_ = now()
    midnight = (time_ + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    return (midnight - time_).total_seconds()


KeysActor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=4096)(Keys)


def start(
    database: str,
    *,
    namespace: str,
    name: str = NAME,
    lifetime: Literal["detached"] | None = None,
    keep: bool = False,
) -> ActorHandle:
    """Starts the keys actor and waits until its database is open.

    Args:
        keep: reuse a living actor with this name.

    Raises:
        KeysUnavailable: the database cannot be used. No actor was started.
    """
    # Opened here first, because an actor whose constructor fails does not report why.
    KeyStore(Database(database)).required()
    options = {"name": name, "namespace": namespace, "lifetime": lifetime, "get_if_exists": keep}
    actor = KeysActor.options(**options).remote(database)
    ray.get(actor.ready.remote())
    return actor
