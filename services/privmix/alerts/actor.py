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

from privmix.alerts.conditions import Conditions, EnsembleState
from privmix.alerts.outbox import Outbox
from privmix.alerts.settings import AlertSettings
from privmix.alerts.webhook import Webhook
from privmix.database.service import ServiceDatabase
from privmix.foundation.actors import HEAD
from privmix.foundation.errors import KeysUnavailable
from privmix.foundation.periodic import periodically
from privmix.keys.actor import Keys
from privmix.requests.errors import ApiError
from privmix.requests.keys import KeyService
from privmix.requests.settings import ServedEnsemble
from privmix.requests.status import Status

NAME = "alerts"
TIMEOUT_S = 10.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceActors:
    """Names the Ray namespace, the keys actor and the ensemble of the service that is checked."""

    namespace: str
    keys: str
    ensemble: ServedEnsemble


class Alerts:
    """Checks a service every `interval_s` seconds and delivers the alerts."""

    def __init__(self, database: str, settings: AlertSettings, service: ServiceActors) -> None:
        self._settings = settings
        self._service = service
        self._outbox = Outbox(ServiceDatabase(database), service.namespace)
        self._webhooks = [Webhook(url, settings.secret, self._outbox) for url in settings.webhooks]
        self._receivers = [webhook.receiver for webhook in self._webhooks]
        self._outbox.keep_receivers(self._receivers)
        self._levels = self._outbox.levels()
        ensemble = service.ensemble
        self._conditions = Conditions(
            ensemble.name, service.namespace, settings.thresholds, settings.patience_s, self._levels
        )
        self._status = Status(
            ensemble.namespace, ensemble.coordinators, ensemble.budget, ensemble.fleet, TIMEOUT_S, TIMEOUT_S
        )
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
        before = dict(self._levels)
        accounts, observation = await asyncio.gather(_result_or_none(self._keys.ask(Keys.accounts)), self._observe())
        alerts = self._conditions.evaluate_shares(accounts or ())
        alerts += self._conditions.evaluate(observation, time.time())
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

    async def _observe(self) -> EnsembleState:
        troubles, statement, shards, traffic = await asyncio.gather(
            self._status.troubles(),
            _result_or_none(self._status.statement()),
            _result_or_none(self._status.shards()),
            _result_or_none(self._keys.ask(Keys.traffic)),
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
