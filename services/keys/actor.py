"""The keys actor: the one process of a service that says who may ask, and charges shares."""

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
from services.keys.messages import Admitted, Identity, NoKey, Pulse, Refused, Room
from services.keys.metrics import ShareMetrics
from services.keys.rates import Rates
from services.keys.records import Key, KeyAccount, KeysUnavailable, Scope, Share, now
from services.keys.store import Exhausted, KeyStore, Reserved
from services.keys.subjects import charged, ensemble_of, group_subject, subjects_of
from services.keys.traffic import Traffic, TrafficReport
from services.keys.turns import QueueFull, Turns

NAME = "keys"
WATCH_S = 5.0
FORFEIT_S = 60.0
"""A gateway that has said nothing for this long is gone: what its requests held stays charged."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass
class _Request:
    """A request between `admit` and `settle`; `begun` once its turn has come, and `task` until it is admitted."""

    subjects: tuple[str, ...]
    generations: int
    gateway: str
    turns: Turns | None = None
    """None: an earlier actor started the request, and no request for the same room has come since."""
    task: "asyncio.Task[object] | None" = None
    background: bool = False
    begun: bool = False
    counted: bool = False
    """Among the live streams of its shares; one of the background only once it has begun."""


class Keys:
    """Identifies keys, admits requests within their shares and in fair turns, and takes back what they did not use.

    Shares and usage are in the database, so a restarted actor continues from there. Rates per minute are in memory and
    start full again. The requests for each ensemble take turns among themselves.
    """

    def __init__(self, database: str) -> None:
        self._store = KeyStore(Database(database))
        self._transaction = asyncio.Lock()
        self._turns: dict[Room, Turns] = {}
        self._rates = Rates()
        self._traffic = Traffic()
        self._metrics = ShareMetrics()
        self._requests: dict[str, _Request] = {}
        self._live: Counter[str] = Counter()
        self._given_back: dict[str, asyncio.Event] = {}
        self._heard: dict[str, float] = {}
        for held in self._store.open_reservations():  # of the actor that this one replaces
            self._enter(held.id, _Request(held.subjects, held.generations, held.gateway, begun=True))
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def ready(self) -> None:
        """Returns when the database is open."""

    async def identify(self, hash_: str | None) -> Identity | NoKey:
        """The key whose secret has this hash."""
        key = await self._do(lambda: self._store.find(hash_)) if hash_ else None
        if key is None:
            return NoKey("unknown", required=await self._do(self._store.required))
        return _identity(key)

    async def identity(self, id_: str) -> Identity | NoKey:
        """The key of this id, for work that goes on after its client has left.

        Raises:
            UnknownKey: there is none.
        """
        return _identity((await self.account(id_)).key)

    async def admit(
        self,
        id_: str,
        subjects: Sequence[str],
        room: Room,
        wanted: int,
        generations: int,
        gateway: str,
        background: bool = False,
    ) -> Admitted | Refused:
        """Charge a request to its shares, and return when its turn has come.

        A request waits while others hold what its share still has, and while the service is full. Fewer tokens than
        `wanted` are admitted where the share ends; then no other request holds any of it.

        Args:
            id_: the request's name, for `settle`.
            subjects: the shares of the key that asks.
            room: of the ensemble that it asks.
            background: let all others go before; nothing of the shares is held while it waits for its turn.
        """
        subjects = charged(subjects, room.shares)
        shares = await self._do(lambda: self._store.shares(subjects))
        if id_ in self._requests:  # Ray sends a call again to an actor that it made again
            before = await self._reserve(id_, wanted)
            return before if isinstance(before, Refused) else Admitted(before.tokens, self._rates.states(shares))
        if refused := self._never(shares, wanted, generations):
            return refused
        if not background and (refused := self._not_now(shares, generations) or self._rates.take(id_, shares, wanted)):
            return refused
        turns = self._turns_in(room)
        request = _Request(subjects, generations, gateway, turns, asyncio.current_task(), background)
        self._enter(id_, request)
        try:
            if background:
                await self._begin(request, turns)
                if refused := self._not_now(shares, generations) or self._rates.take(id_, shares, wanted):
                    await self._end(id_, 0)
                    return refused
                self._count(request)
            reserved = await self._reserve(id_, wanted)
            if isinstance(reserved, Refused):
                await self._end(id_, 0)
                return reserved
            if not background:
                await self._begin(request, turns)
        except QueueFull:
            await self._end(id_, 0)
            return Refused("overloaded", retry_after_s=1.0)
        except BaseException:
            await asyncio.shield(self._end(id_, 0))
            raise
        request.task = None
        self._rates.put_back(id_, wanted - reserved.tokens)
        return Admitted(reserved.tokens, self._rates.states(shares))

    async def settle(self, id_: str, used: int | None) -> None:
        """A request has ended, after `used` tokens; None where nobody knows, then all it was granted stays charged.

        A request that still waits to be admitted is given up.
        """
        request = self._requests.get(id_)
        if request is not None and request.task is not None:
            request.task.cancel()
            await asyncio.wait([request.task])
        await self._end(id_, used)

    async def pulse(self, gateway: str, seen: Pulse) -> None:
        """What a gateway has seen. Each sends this every second or so, and counts as gone when it does not."""
        self._heard[gateway] = time.monotonic()
        self._traffic.add(gateway, seen)

    async def traffic(self, ensemble: str | None = None) -> TrafficReport:
        """What all gateways have seen: of one ensemble, or of all together."""
        rooms = (turns for room, turns in self._turns.items() if ensemble in (None, room.ensemble))
        return self._traffic.report(ensemble, waiting=sum(turns.waiting for turns in rooms))

    async def accounts(self) -> list[KeyAccount]:
        """Every key, with its share and its usage."""
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
        """See `KeyStore.create`; the second is the secret's text."""
        key, secret = await self._do(
            lambda: self._store.create(name, owner=owner, group=group, scopes=scopes, expires=expires, share=share)
        )
        return key, secret.text

    async def limit(self, id_or_name: str, share: Share, ensemble: str | None = None) -> KeyAccount:
        """See `KeyStore.limit`."""
        account = await self._do(lambda: self._store.limit(id_or_name, share, ensemble))
        self._look_again(charged(subjects_of(account.key), ensemble))
        return account

    async def limit_group(self, group: str, share: Share, ensemble: str | None = None) -> None:
        """See `KeyStore.limit_group`."""
        await self._do(lambda: self._store.limit_group(group, share, ensemble))
        self._look_again(charged((group_subject(group),), ensemble))

    async def rotate(self, id_or_name: str, grace: timedelta) -> tuple[Key, str]:
        """See `KeyStore.rotate`; the second is the secret's text."""
        key, secret = await self._do(lambda: self._store.rotate(id_or_name, grace))
        return key, secret.text

    async def revoke(self, id_or_name: str) -> Key:
        """See `KeyStore.revoke`; requests that run end as they would."""
        return await self._do(lambda: self._store.revoke(id_or_name))

    @staticmethod
    def _never(shares: dict[str, Share], wanted: int, generations: int) -> Refused | None:
        """The refusal of a request that one of its shares could never pay for."""
        for share in shares.values():
            if share.largest_request is not None and wanted > share.largest_request:
                return Refused("request_too_large", share.largest_request)
            if share.tokens_per_minute is not None and wanted > share.tokens_per_minute:
                return Refused("larger_than_a_minute", share.tokens_per_minute)
            if share.live_streams is not None and generations > share.live_streams:
                return Refused("more_than_live_streams", share.live_streams)
        return None

    def _not_now(self, shares: dict[str, Share], generations: int) -> Refused | None:
        for subject, share in shares.items():
            if share.live_streams is not None and self._live[subject] + generations > share.live_streams:
                return Refused("live_streams", share.live_streams)
        return None

    async def _reserve(self, id_: str, wanted: int) -> Reserved | Refused:
        request = self._requests[id_]
        while True:
            # Taken before the share is looked at: what is given back meanwhile is not missed.
            given_back = {each: self._given_back.setdefault(each, asyncio.Event()) for each in request.subjects}
            outcome = await self._do(
                lambda: self._store.reserve(id_, request.subjects, wanted, request.generations, request.gateway)
            )
            match outcome:
                case Reserved():
                    return outcome
                case Exhausted(limit="tokens_per_day"):
                    return Refused("daily_share_exhausted", retry_after_s=_until_midnight())
                case Exhausted():
                    return Refused("share_exhausted")
                case _ if request.background:  # it has a place, for which the holder of the share may wait
                    return Refused("overloaded", retry_after_s=1.0)
                case _:
                    await given_back[outcome.subject].wait()

    def _turns_in(self, room: Room) -> Turns:
        """The turns of one room. Its first use counts the requests that an earlier actor started."""
        if room not in self._turns:
            turns = self._turns[room] = Turns(room.capacity, room.max_waiting)
            for request in self._requests.values():
                if request.turns is None and ensemble_of(request.subjects) == room.shares:
                    turns.restore(request.subjects[0], request.generations)
                    request.turns = turns
        return self._turns[room]

    @staticmethod
    async def _begin(request: _Request, turns: Turns) -> None:
        """Wait for the turn of a request."""
        await turns.take(request.subjects[0], request.generations, background=request.background)
        request.begun = True

    def _enter(self, id_: str, request: _Request) -> None:
        self._requests[id_] = request
        self._heard.setdefault(request.gateway, time.monotonic())
        if not request.background:
            self._count(request)

    def _count(self, request: _Request) -> None:
        request.counted = True
        for subject in request.subjects:
            self._live[subject] += request.generations

    async def _end(self, id_: str, used: int | None) -> None:
        """Settle a reservation, if there is one, and let others have what it held. Doing so again changes nothing."""
        settled = await self._do(lambda: self._store.settle(id_, used))
        request = self._requests.pop(id_, None)
        if request is not None:
            for subject in request.subjects if request.counted else ():
                self._live[subject] -= request.generations
            if request.begun and request.turns is not None:
                request.turns.give_back(request.subjects[0], request.generations, background=request.background)
        self._rates.end(id_, 0 if settled is None else settled.tokens if used is None else used)
        if settled is not None:
            self._look_again(settled.subjects)

    def _look_again(self, subjects: Sequence[str]) -> None:
        """Wake the requests that wait for these shares."""
        for subject in subjects:
            if event := self._given_back.pop(subject, None):
                event.set()

    async def _do(self, work: Callable[[], T]) -> T:
        """One transaction off the event loop. A caller that is cancelled does not end it half-way."""

        async def exclusively() -> T:
            async with self._transaction:
                return await asyncio.to_thread(work)

        return await asyncio.shield(asyncio.ensure_future(exclusively()))

    async def _watch(self) -> None:
        """Settle what gateways held that are gone, and measure the shares."""
        while True:
            await asyncio.sleep(WATCH_S)
            with suppress(KeysUnavailable):
                self._metrics.looked(await self.accounts())
            gone = {gateway for gateway, at in self._heard.items() if time.monotonic() - at > FORFEIT_S}
            for id_, request in list(self._requests.items()):
                if request.gateway in gone:
                    try:
                        await self.settle(id_, None)
                    except KeysUnavailable as error:
                        _log.warning("%s", error)
            for gateway in gone:
                del self._heard[gateway]


def _identity(key: Key) -> Identity | NoKey:
    if not key.valid(now()):
        return NoKey("revoked" if key.revoked else "expired")
    return Identity(key.id, key.name, key.scopes, subjects_of(key))


def _until_midnight() -> float:
    moment = now()
    midnight = (moment + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    return (midnight - moment).total_seconds()


KeysActor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=4096)(Keys)


def start(
    database: str,
    *,
    namespace: str,
    name: str = NAME,
    lifetime: Literal["detached"] | None = None,
    keep: bool = False,
) -> ActorHandle:
    """Start the keys actor under a name, and wait for its database.

    Args:
        keep: take the actor of this name that lives already, if there is one.

    Raises:
        KeysUnavailable: the database cannot be used; no actor is left behind.
    """
    KeyStore(Database(database)).required()  # an actor whose constructor fails would only say that it died
    options = {"name": name, "namespace": namespace, "lifetime": lifetime, "get_if_exists": keep}
    actor = KeysActor.options(**options).remote(database)
    ray.get(actor.ready.remote())
    return actor
