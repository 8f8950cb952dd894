"""Implements the Ray actor that identifies API keys, admits their requests and charges their shares."""

import asyncio
import time
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from typing import Literal

import ray
from ray.actor import ActorHandle

from privmix.database.service import ServiceDatabase
from privmix.foundation.actors import HEAD
from privmix.foundation.errors import ConfigurationError, KeysUnavailable
from privmix.foundation.periodic import periodically
from privmix.keys.grouping import GroupedTransactions
from privmix.keys.messages import AdmissionLimits, Admitted, Identity, InvalidKey, Refused, TrafficUpdate
from privmix.keys.metrics import ShareMetrics
from privmix.keys.open_requests import OpenRequests
from privmix.keys.records import Key
from privmix.keys.reservations import are_required, find, opened, spent_ratios
from privmix.keys.traffic import Traffic, TrafficReport

NAME = "keys"
WATCH_S = 5.0
HEARTBEAT_TIMEOUT_S = 60.0
"""A gateway without a heartbeat for this long is considered gone. The tokens that its requests held stay charged."""

IDENTITY_AGE_S = 1.0
"""How long a key is not read again from the database. A key that another process revokes is refused after this time."""
MAX_IDENTITIES = 10_000


class Keys:
    """Identifies keys, admits their requests (`OpenRequests`), and watches gateways.

    Keys, shares and usage are in the database, so a restarted actor continues from there. `privmix keys` changes them
    there. Services of several namespaces can share the database: gateways have the mark of theirs before their names.
    """

    def __init__(self, database: str, namespace: str = "") -> None:
        self._mark = sha256(namespace.encode()).hexdigest()[:16]
        service = ServiceDatabase(database)
        self._place = service.name
        self._transactions = GroupedTransactions(service)
        self._identities: dict[str, tuple[float, Key]] = {}
        self._required = False
        self._traffic = Traffic()
        self._metrics = ShareMetrics()
        with service.transaction() as connection:
            own = [each for each in opened(connection) if each.gateway.startswith(self._mark)]
        self._open = OpenRequests(self._transactions, own)
        self._heartbeats: dict[str, float] = {}
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def ready(self) -> str:
        """Returns the place of the database, without a password, once it is open."""
        return self._place

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
        await self._transactions.run(are_required)

    async def admit(
        self,
        id_: str,
        identity: Identity,
        limits: AdmissionLimits,
        wanted: int,
        generations: int,
        gateway: str,
    ) -> Admitted | Refused:
        """See `OpenRequests.admit`."""
        gateway = self._mark + gateway
        self._heartbeats.setdefault(gateway, time.monotonic())
        return await self._open.admit(id_, identity, limits, wanted, generations, gateway)

    async def settle(self, id_: str, used: int | None) -> None:
        """See `OpenRequests.settle`."""
        await self._open.settle(id_, used)

    async def heartbeat(self, gateway: str, update: TrafficUpdate) -> None:
        """Records that a gateway is alive, and its traffic. Gateways send one about every second."""
        self._heartbeats[self._mark + gateway] = time.monotonic()
        self._traffic.add(gateway, update)

    async def traffic(self) -> TrafficReport:
        """Returns the traffic of all gateways."""
        return self._traffic.report(waiting=self._open.queue.waiting)

    async def _are_required(self) -> bool:
        """Returns whether clients need a key. Once they do, they always do, so that answer is never read again."""
        if not self._required:
            self._required = await self._transactions.run(are_required)
        return self._required

    async def _find(self, hash_: str) -> Key | None:
        """Returns the key of a secret. Keys that were found lately are not read again."""
        read_at, known = self._identities.get(hash_, (0.0, None))
        if known is not None and time.monotonic() - read_at < IDENTITY_AGE_S:
            return known
        key = await self._transactions.run(lambda connection: find(connection, hash_))
        if key is not None:
            if len(self._identities) >= MAX_IDENTITIES:
                self._identities.clear()
            self._identities[hash_] = time.monotonic(), key
        return key

    async def _watch(self) -> None:
        """Settles the requests of gateways that are gone, and updates the metrics of the shares."""
        await asyncio.sleep(WATCH_S)
        await periodically(self._tend, WATCH_S, "the requests of lost gateways could not be settled")

    async def _tend(self) -> None:
        with suppress(KeysUnavailable):
            self._metrics.update(await self._transactions.run(spent_ratios))
        now_s = time.monotonic()
        # Requests of a gateway that is not known, such as those that a previous actor admitted.
        self._heartbeats = dict.fromkeys(self._open.gateways(), now_s) | self._heartbeats
        gone = {gateway for gateway, last_s in self._heartbeats.items() if now_s - last_s > HEARTBEAT_TIMEOUT_S}
        await self._open.settle_lost(gone)
        for gateway in gone:
            del self._heartbeats[gateway]


def _identity(key: Key) -> Identity | InvalidKey:
    if not key.valid(datetime.now(UTC)):
        return InvalidKey("revoked" if key.revoked else "expired")
    return Identity(key.id, key.name, key.share.live_streams)


KeysActor = ray.remote(num_cpus=0, resources=HEAD, max_restarts=-1, max_task_retries=-1, max_concurrency=4096)(Keys)


def start(
    database: str,
    *,
    namespace: str,
    lifetime: Literal["detached"] | None = None,
    keep: bool = False,
) -> ActorHandle:
    """Starts the keys actor and waits until its database is open.

    Args:
        keep: reuse the living actor of the namespace.

    Raises:
        KeysUnavailable: the database cannot be used. No actor was started.
        ConfigurationError: the living actor has another database, which it would go on to use.
    """
    # Opened here first, because an actor whose constructor fails does not report why.
    place = ServiceDatabase(database).name
    options = {"name": NAME, "namespace": namespace, "lifetime": lifetime, "get_if_exists": keep}
    actor = KeysActor.options(**options).remote(database, namespace)
    if (kept := ray.get(actor.ready.remote())) != place:
        raise ConfigurationError(
            f"keys.database: {namespace} already serves with the keys in {kept}, which a deployment does not change; "
            "stop the service and start it again"
        )
    return actor
