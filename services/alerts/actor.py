"""The alerts actor: looks at the service, and tells webhooks what an operator should know. Nothing waits for it."""

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

from services.alerts.conditions import Conditions, Observation
from services.alerts.outbox import Outbox
from services.alerts.settings import AlertSettings
from services.alerts.webhook import Webhook
from services.ensembles.records import Ensemble, EnsembleList
from services.gateway.errors import ApiError
from services.gateway.keys import KeyService
from services.gateway.status import Status
from services.keys.database import Database
from services.keys.records import KeysUnavailable

NAME = "alerts"
TIMEOUT_S = 10.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Watched:
    """The service that is looked at: the names of its actors."""

    namespace: str
    keys: str
    ensembles: str


@dataclass(frozen=True)
class _Watch:
    """One ensemble that is looked at."""

    name: str
    conditions: Conditions
    status: Status


class Alerts:
    """Looks at the ensembles of a service every `interval_s`, and delivers what that gives."""

    def __init__(self, database: str, settings: AlertSettings, watched: Watched) -> None:
        self._settings = settings
        self._watched = watched
        self._outbox = Outbox(Database(database), watched.namespace)
        self._webhooks = [Webhook(url, settings.secret, self._outbox) for url in settings.webhooks]
        self._receivers = [webhook.receiver for webhook in self._webhooks]
        self._outbox.keep_receivers(self._receivers)
        self._levels = self._outbox.levels()
        self._watches: dict[Ensemble, _Watch] = {}
        self._keys = KeyService((), watched.namespace, watched.keys)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work) for work in (self._watch(), *(hook.deliver() for hook in self._webhooks))]

    async def ready(self) -> None:
        """Returns when the database is open."""

    async def made_from(self) -> AlertSettings:
        return self._settings

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except KeysUnavailable as error:
                _log.warning("%s", error)
            except Exception as error:  # whatever fails, the next look is tried
                _log.error("the service could not be looked at: %s", type(error).__name__)
            await asyncio.sleep(self._settings.interval_s)

    async def _look(self) -> None:
        await self._follow()
        before = dict(self._levels)
        accounts, *seen = await asyncio.gather(
            _answer(self._keys.ask("accounts")), *(self._observe(watch) for watch in self._watches.values())
        )
        now = time.time()
        alerts = self._shares().look_at_shares(accounts or ())
        for watch, observation in zip(self._watches.values(), seen, strict=True):
            alerts += watch.conditions.look(observation, now)
        if not alerts and self._levels == before:
            return
        try:
            await asyncio.to_thread(self._outbox.put, alerts, dict(self._levels), self._receivers)
        except KeysUnavailable:
            self._levels.clear()  # the next look fires them again
            self._levels.update(before)
            raise
        for webhook in self._webhooks:
            webhook.wake()

    async def _follow(self) -> None:
        """Watch the present ensembles of the service. An ensemble that drains is watched until it is retired."""
        with suppress(RayError, ValueError, TimeoutError):  # then those that it had
            async with asyncio.timeout(TIMEOUT_S):
                actor = await asyncio.to_thread(ray.get_actor, self._watched.ensembles, self._watched.namespace)
                current: EnsembleList = await actor.current.remote()
                present = [entry.ensemble for entry in current.entries]
                self._watches = {each: self._watches.get(each) or self._watch_of(each) for each in present}

    def _watch_of(self, ensemble: Ensemble) -> _Watch:
        prefix = f"{ensemble.name}/" if ensemble.own_shares else ""
        status = Status(
            ensemble.namespace, ensemble.coordinators, ensemble.budget, ensemble.fleet, TIMEOUT_S, TIMEOUT_S
        )
        return _Watch(ensemble.name, self._conditions(ensemble.name, prefix), status)

    def _shares(self) -> Conditions:
        """The conditions of the shares of keys and groups."""
        return self._conditions(", ".join(watch.name for watch in self._watches.values()), "")

    def _conditions(self, ensemble: str, prefix: str) -> Conditions:
        settings = self._settings
        return Conditions(
            ensemble, self._watched.namespace, settings.thresholds, settings.patience_s, self._levels, prefix
        )

    async def _observe(self, watch: _Watch) -> Observation:
        troubles, statement, shards, traffic = await asyncio.gather(
            watch.status.troubles(),
            _answer(watch.status.statement()),
            _answer(watch.status.shards()),
            _answer(self._keys.ask("traffic", watch.name)),
        )
        return Observation(troubles=troubles, statement=statement, traffic=traffic, shards=shards)


async def _answer(asked: Awaitable[T]) -> T | None:
    with suppress(ApiError, TimeoutError):
        async with asyncio.timeout(TIMEOUT_S):
            return await asked
    return None


AlertsActor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Alerts)


def start(
    database: str,
    settings: AlertSettings,
    watched: Watched,
    *,
    lifetime: Literal["detached"] | None = None,
    keep: bool = False,
) -> ActorHandle | None:
    """Start the alerts actor, where there are webhooks; one with other settings is replaced.

    Args:
        keep: take the actor that lives already, if it has these settings.
    """
    if keep:
        with suppress(ValueError):  # there is none
            living = ray.get_actor(NAME, watched.namespace)
            if ray.get(living.made_from.remote()) == settings:
                return living
            ray.kill(living)
    if not settings.webhooks:
        return None
    options = {"name": NAME, "namespace": watched.namespace, "lifetime": lifetime}
    actor = AlertsActor.options(**options).remote(database, settings, watched)
    ray.get(actor.ready.remote())
    return actor
