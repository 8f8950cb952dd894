"""Implements the Ray actor that identifies API keys, admits their requests and charges their shares."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

import ray
from ray.actor import ActorHandle

from services.actors import HEAD
from services.database.clock import now
from services.database.deadline import DATABASE_TIMEOUT_S
from services.database.service import ServiceDatabase
from services.errors import KeysUnavailable
from services.keys.fair_queue import FairQueue, QueueFull
from services.keys.grouping import GroupedTransactions
from services.keys.messages import AdmissionLimits, Admitted, Identity, InvalidKey, Refused, TrafficUpdate
from services.keys.metrics import ShareMetrics
from services.keys.rate_limiter import RateLimiter
from services.keys.records import Key, KeyAccount, Scope, Share
from services.keys.store import KeyStore
from services.keys.subjects import charged_subjects, ensemble_of, group_subject, subjects_of
from services.keys.traffic import Traffic, TrafficReport
from services.keys.transactions import (
    AreRequired,
    Exhausted,
    Find,
    OpenReservation,
    ReadShares,
    Reserve,
    Reserved,
    Settle,
)
from services.retrying import pauses, repeated

NAME = "keys"
WATCH_S = 5.0
HEARTBEAT_TIMEOUT_S = 60.0
"""A gateway without a heartbeat for this long is considered gone. The tokens that its requests held stay charged."""

IDENTITY_AGE_S = 1.0
"""How long a key is not read again from the database. A key that another process revokes is refused after this time."""
MAX_IDENTITIES = 10_000
RETRY_S = 1.0

logger = logging.getLogger(__name__)


@dataclass
class _Request:
    """Holds a request between `admit` and `settle`.

    Attributes:
        queue: None if a previous actor admitted the request and its ensemble has had no other request since.
        task: the task in which the request waits; None once it is admitted.
        entering: the tasks that wait for places of further generations.
        places: the number of its generations that have places in the queue.
        counted: whether it counts as live streams of its shares. A background request counts only once it has started.
    """

    subjects: tuple[str, ...]
    generations: int
    gateway: str
    queue: FairQueue | None = None
    task: "asyncio.Task[object] | None" = None
    background: bool = False
    entering: "set[asyncio.Task[object]]" = field(default_factory=set)
    places: int = 0
    counted: bool = False


class Keys:
    """Identifies keys, admits requests fairly within their shares, and returns unused tokens to the shares.

    Shares and usage are in the database, so a restarted actor continues from there. Rate limits are in memory and start
    full after a restart. Each ensemble has a queue of its own.
    """

    def __init__(self, database: str) -> None:
        self._store = KeyStore(ServiceDatabase(database))
        self._transactions = GroupedTransactions(self._store)
        self._identities: dict[str, tuple[float, Key]] = {}
        self._required = False
        # The last reading of all accounts with its time, unless a key was changed since.
        self._accounts: tuple[float, list[KeyAccount]] | None = None
        self._accounts_lock = asyncio.Lock()
        self._changes = 0
        self._settling: set[asyncio.Task[OpenReservation | None]] = set()
        self._waiting: Counter[str] = Counter()
        self._queues: dict[AdmissionLimits, FairQueue] = {}
        self._rate_limiter = RateLimiter()
        self._traffic = Traffic()
        self._metrics = ShareMetrics()
        self._requests: dict[str, _Request] = {}
        self._live_streams: Counter[str] = Counter()
        self._share_changed: dict[str, asyncio.Event] = {}
        self._heartbeats: dict[str, float] = {}
        for open_ in self._store.open_reservations():  # requests that a previous actor admitted
            self._add(open_.id, _Request(open_.subjects, open_.generations, open_.gateway))
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def ready(self) -> None:
        """Returns when the database is open."""

    async def identify(self, hash_: str | None) -> Identity | InvalidKey:
        """Returns the identity of the key whose secret has this hash."""
        key = await self._find(hash_) if hash_ else None
        if key is None:
            return InvalidKey("unknown", required=await self._are_required())
        return _identity(key)

    async def health(self) -> None:
        """Returns if the database can be written now.

        Raises:
            KeysUnavailable: it cannot.
        """
        await self._transactions.run(ReadShares(()))

    async def identity(self, id_: str) -> Identity | InvalidKey:
        """Returns the identity of the key with this id, for work that continues after its client has left.

        Raises:
            UnknownKey: no key has this id.
        """
        return _identity(await self._transactions.alone(lambda: self._store.key(id_)))

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
        subjects, first = charged_subjects(subjects, limits.shares), min(generations, limits.piece)
        shares: dict[str, Share] = await self._transactions.run(ReadShares(subjects))
        queue = self._queue_for(limits)
        if id_ in self._requests:  # Ray repeats a call after it has restarted the actor.
            before = await self._reserve(id_, wanted)
            states = self._rate_limiter.states(shares)
            return before if isinstance(before, Refused) else Admitted(before.tokens, states, first)
        if refused := self._exceeds_share(shares, wanted, generations):
            return refused
        if not background and (refused := self._exceeds_rates(id_, shares, wanted, generations)):
            return refused
        request = _Request(subjects, generations, gateway, queue, asyncio.current_task(), background)
        self._add(id_, request)
        try:
            if background:
                await self._start(request, first)
                if refused := self._exceeds_rates(id_, shares, wanted, generations):
                    await self._end(id_, 0)
                    return refused
                self._count(request)
            reserved = await self._reserve(id_, wanted)
            if isinstance(reserved, Refused):
                await self._end(id_, 0)
                return reserved
            if not background:
                await self._start(request, first)
        except QueueFull:
            await self._end(id_, 0)
            return Refused("overloaded", retry_after_s=1.0)
        except BaseException:
            await asyncio.shield(self._end(id_, 0))
            raise
        request.task = None
        self._rate_limiter.put_back(id_, wanted - reserved.tokens)
        return Admitted(reserved.tokens, self._rate_limiter.states(shares), first)

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

    async def heartbeat(self, gateway: str, update: TrafficUpdate) -> None:
        """Records that a gateway is alive, and its traffic. Gateways send one about every second."""
        self._heartbeats[gateway] = time.monotonic()
        self._traffic.add(gateway, update)

    async def traffic(self, ensemble: str | None = None) -> TrafficReport:
        """Returns the traffic of all gateways, for one ensemble or for all together."""
        queues = (queue for limits, queue in self._queues.items() if ensemble in (None, limits.ensemble))
        return self._traffic.report(ensemble, waiting=sum(queue.waiting for queue in queues))

    async def accounts(self, age_s: float = 0.0) -> list[KeyAccount]:
        """See `KeyStore.accounts`. Every change of a key through this actor is in them.

        Args:
            age_s: how old the usages may be. To read thousands of keys takes long, so callers share a reading.
        """
        asked = time.monotonic()
        async with self._accounts_lock:
            if self._accounts is None or self._accounts[0] < asked - age_s:
                changes, read_at = self._changes, time.monotonic()
                rows = await self._transactions.alone(self._store.read_accounts)
                accounts = await asyncio.to_thread(rows.built)
                if changes != self._changes:
                    return accounts
                self._accounts = read_at, accounts
            return self._accounts[1]

    def _keys_changed(self) -> None:
        self._identities.clear()
        self._accounts, self._changes = None, self._changes + 1

    async def account(self, id_or_name: str) -> KeyAccount:
        """See `KeyStore.account`."""
        return await self._transactions.alone(lambda: self._store.account(id_or_name))

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
        key, secret = await self._transactions.alone(
            lambda: self._store.create(name, owner=owner, group=group, scopes=scopes, expires=expires, share=share)
        )
        self._keys_changed()
        return key, secret.text

    async def limit(self, id_or_name: str, share: Share, ensemble: str | None = None) -> KeyAccount:
        """See `KeyStore.limit`."""
        account = await self._transactions.alone(lambda: self._store.limit(id_or_name, share, ensemble))
        self._keys_changed()
        self._wake_waiting(charged_subjects(subjects_of(account.key), ensemble))
        return account

    async def limit_group(self, group: str, share: Share, ensemble: str | None = None) -> None:
        """See `KeyStore.limit_group`."""
        await self._transactions.alone(lambda: self._store.limit_group(group, share, ensemble))
        self._keys_changed()
        self._wake_waiting(charged_subjects((group_subject(group),), ensemble))

    async def rotate(self, id_or_name: str, grace: timedelta) -> tuple[Key, str]:
        """See `KeyStore.rotate`. Returns the key and the text of its secret."""
        key, secret = await self._transactions.alone(lambda: self._store.rotate(id_or_name, grace))
        self._keys_changed()
        return key, secret.text

    async def revoke(self, id_or_name: str) -> Key:
        """See `KeyStore.revoke`. Running requests continue to their end."""
        key = await self._transactions.alone(lambda: self._store.revoke(id_or_name))
        self._keys_changed()
        return key

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
        # A request that waits for its share occupies this actor, as one in the queue does.
        key, limit = request.subjects[0], max(1, request.queue.max_waiting_of_key) if request.queue else 1
        while True:
            # The events must exist before the share is read, so that no change in between is missed.
            changed = {
                subject: self._share_changed.setdefault(subject, asyncio.Event()) for subject in request.subjects
            }
            outcome = await self._transactions.run(
                Reserve(id_, request.subjects, wanted, request.generations, request.gateway)
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
                case _ if self._waiting[key] >= limit:
                    return Refused("overloaded", retry_after_s=1.0)
                case _:
                    self._waiting[key] += 1
                    try:
                        await changed[outcome.subject].wait()
                    finally:
                        self._waiting[key] -= 1

    def _queue_for(self, limits: AdmissionLimits) -> FairQueue:
        """Returns the queue of an ensemble. A new queue contains the requests that a previous actor admitted."""
        if limits not in self._queues:
            queue = FairQueue(limits.capacity, limits.max_waiting, limits.max_waiting_of_key)
            self._queues[limits] = queue
            for request in self._requests.values():
                if request.queue is None and ensemble_of(request.subjects) == limits.shares:
                    request.queue, request.places = queue, min(request.generations, limits.piece)
                    queue.restore(request.subjects[0], request.places)
        return self._queues[limits]

    @staticmethod
    async def _start(request: _Request, generations: int, *, unlimited: bool = False) -> None:
        """Waits until the queue lets generations of the request start."""
        assert request.queue is not None
        await request.queue.acquire(
            request.subjects[0], generations, background=request.background, unlimited=unlimited
        )
        request.places += generations

    @staticmethod
    def _leave(request: _Request, generations: int) -> None:
        ended = min(generations, request.places)
        request.places -= ended
        if ended and request.queue is not None:
            request.queue.free(request.subjects[0], ended, background=request.background)

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
        """Releases everything that a request holds, and settles its reservation. Idempotent.

        If the database does not answer in time, it is settled later.
        """
        request = self._requests.pop(id_, None)
        if request is not None:
            for subject in request.subjects if request.counted else ():
                self._live_streams[subject] -= request.generations
            self._leave(request, request.places)
        settling = asyncio.get_running_loop().create_task(self._settle(id_, used))
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)
        await asyncio.wait((settling,), timeout=DATABASE_TIMEOUT_S)

    async def _settle(self, id_: str, used: int | None) -> OpenReservation | None:
        """Settles a reservation, and tries until the database answers."""
        settled: OpenReservation | None = await repeated(
            lambda: self._transactions.run(Settle(id_, used)),
            KeysUnavailable,
            pauses(RETRY_S),
            log=lambda error: logger.warning("a request is settled later: %s", error),
        )
        self._rate_limiter.end(id_, 0 if settled is None else settled.tokens if used is None else used)
        if settled is not None:
            self._wake_waiting(settled.subjects)
        return settled

    async def _are_required(self) -> bool:
        """Returns whether clients need a key. Once they do, they always do, so that answer is never read again."""
        if not self._required:
            self._required = await self._transactions.run(AreRequired())
        return self._required

    async def _find(self, hash_: str) -> Key | None:
        """Returns the key of a secret. Keys that were found lately are not read again."""
        read_at, known = self._identities.get(hash_, (0.0, None))
        if known is not None and time.monotonic() - read_at < IDENTITY_AGE_S:
            return known
        key: Key | None = await self._transactions.run(Find(hash_))
        if key is not None:
            if len(self._identities) >= MAX_IDENTITIES:
                self._identities.clear()
            self._identities[hash_] = time.monotonic(), key
        return key

    def _wake_waiting(self, subjects: Sequence[str]) -> None:
        """Wakes the requests that wait for tokens of these shares."""
        for subject in subjects:
            if event := self._share_changed.pop(subject, None):
                event.set()

    async def _watch(self) -> None:
        """Settles the requests of gateways that are gone, and updates the metrics of the shares."""
        while True:
            await asyncio.sleep(WATCH_S)
            with suppress(KeysUnavailable):
                self._metrics.update(await self.accounts(WATCH_S))
            now_s = time.monotonic()
            gone = {gateway for gateway, last_s in self._heartbeats.items() if now_s - last_s > HEARTBEAT_TIMEOUT_S}
            for id_, request in list(self._requests.items()):
                if request.gateway in gone:
                    await self.settle(id_, None)
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


KeysActor = ray.remote(num_cpus=0, resources=HEAD, max_restarts=-1, max_task_retries=-1, max_concurrency=4096)(Keys)


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
    KeyStore(ServiceDatabase(database)).required()
    options = {"name": name, "namespace": namespace, "lifetime": lifetime, "get_if_exists": keep}
    actor = KeysActor.options(**options).remote(database)
    ray.get(actor.ready.remote())
    return actor
