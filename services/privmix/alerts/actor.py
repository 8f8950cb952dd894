"""Implements the Ray actor that checks the service and posts alerts to webhooks. No request depends on it."""

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from privmix.alerts.conditions import Conditions, EnsembleState
from privmix.alerts.outbox import Outbox
from privmix.alerts.settings import AlertSettings
from privmix.alerts.webhook import Webhook
from privmix.database.service import ServiceDatabase
from privmix.ensembles.actor import Ensembles
from privmix.ensembles.records import ServedEnsemble
from privmix.foundation.actors import HEAD, find_actor, remote
from privmix.foundation.errors import KeysUnavailable
from privmix.foundation.periodic import periodically
from privmix.keys.actor import Keys
from privmix.requests.errors import ApiError
from privmix.requests.keys import KeyService
from privmix.requests.status import Status

NAME = "alerts"
TIMEOUT_S = 10.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceActors:
    """Names the Ray namespace and the actors of the service that is checked."""

    namespace: str
    keys: str
    ensembles: str


@dataclass(frozen=True)
class _Watch:
    """Holds what the actor needs to check one ensemble."""

    name: str
    conditions: Conditions
    status: Status


class Alerts:
    """Checks the ensembles of a service every `interval_s` seconds and delivers the alerts."""

    def __init__(self, database: str, settings: AlertSettings, service: ServiceActors) -> None:
        self._settings = settings
        self._service = service
        self._outbox = Outbox(ServiceDatabase(database), service.namespace)
        self._webhooks = [Webhook(url, settings.secret, self._outbox) for url in settings.webhooks]
        self._receivers = [webhook.receiver for webhook in self._webhooks]
        self._outbox.keep_receivers(self._receivers)
        self._levels = self._outbox.levels()
        self._watches: dict[ServedEnsemble, _Watch] = {}
        self._keys = KeyService((), service.namespace, service.keys)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work) for work in (self._watch(), *(hook.deliver() for hook in self._webhooks))]

    async def ready(self) -> None:
        """Returns when the database is open."""

    async def settings(self) -> AlertSettings:
        """Returns the settings with which this actor was created."""
        return self._settings

    async def _watch(self) -> None:
        await periodically(self._check, self._settings.interval_s, "the service could not be checked")

    async def _check(self) -> None:
        await self._update_watches()
        before = dict(self._levels)
        accounts, observations = await asyncio.gather(
            _result_or_none(self._keys.ask(Keys.accounts)),
            asyncio.gather(*(self._observe(watch) for watch in self._watches.values())),
        )
        now = time.time()
        alerts = self._share_conditions().evaluate_shares(accounts or ())
        for watch, observation in zip(self._watches.values(), observations, strict=True):
            alerts += watch.conditions.evaluate(observation, now)
        if not alerts and self._levels == before:
            return
        try:
            await asyncio.to_thread(self._outbox.put, alerts, dict(self._levels), self._receivers)
        except KeysUnavailable:
            self._levels.clear()  # The next check fires the alerts again.
            self._levels.update(before)
            raise
        for webhook in self._webhooks:
            webhook.wake()

    async def _update_watches(self) -> None:
        """Reads the current ensembles of the service. Keeps the old ones if the ensembles actor does not answer."""
        with suppress(RayError, ValueError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                actor = await find_actor(self._service.ensembles, self._service.namespace)
                current = await remote(Ensembles.current)(actor)
                ensembles = [entry.ensemble for entry in current.entries]
                self._watches = {
                    ensemble: self._watches.get(ensemble) or self._watch_of(ensemble) for ensemble in ensembles
                }

    def _watch_of(self, ensemble: ServedEnsemble) -> _Watch:
        prefix = f"{ensemble.name}/" if ensemble.own_shares else ""
        status = Status(
            ensemble.namespace, ensemble.coordinators, ensemble.budget, ensemble.fleet, TIMEOUT_S, TIMEOUT_S
        )
        return _Watch(ensemble.name, self._conditions(ensemble.name, prefix), status)

    def _share_conditions(self) -> Conditions:
        """Returns the conditions for the shares of keys and groups."""
        return self._conditions(", ".join(watch.name for watch in self._watches.values()), "")

    def _conditions(self, ensemble: str, prefix: str) -> Conditions:
        settings = self._settings
        return Conditions(
            ensemble, self._service.namespace, settings.thresholds, settings.patience_s, self._levels, prefix
        )

    async def _observe(self, watch: _Watch) -> EnsembleState:
        troubles, statement, shards, traffic = await asyncio.gather(
            watch.status.troubles(),
            _result_or_none(watch.status.statement()),
            _result_or_none(watch.status.shards()),
            _result_or_none(self._keys.ask(Keys.traffic, watch.name)),
        )
        return EnsembleState(troubles=troubles, statement=statement, traffic=traffic, shards=shards)


async def _result_or_none(call: Awaitable[T]) -> T | None:
    """Awaits a call to an actor. Returns None if it fails or takes too long."""
    with suppress(ApiError, TimeoutError):
        async with asyncio.timeout(TIMEOUT_S):
            return await call
    return None


AlertsActor = ray.remote(num_cpus=0, resources=HEAD, max_restarts=-1, max_task_retries=-1)(Alerts)


def start(
    database: str,
    settings: AlertSettings,
    service: ServiceActors,
    *,
    lifetime: Literal["detached"] | None = None,
    keep: bool = False,
) -> ActorHandle | None:
    """Starts the alerts actor. Returns None without webhooks.

    Args:
        keep: reuse a living actor with these settings; replace one with other settings.
    """
    if keep:
        with suppress(ValueError):  # Ray raises it if no such actor exists.
            living = ray.get_actor(NAME, service.namespace)
            if ray.get(living.settings.remote()) == settings:
                return living
            ray.kill(living)
    if not settings.webhooks:
        return None
    options = {"name": NAME, "namespace": service.namespace, "lifetime": lifetime}
    actor = AlertsActor.options(**options).remote(database, settings, service)
    ray.get(actor.ready.remote())
    return actor
