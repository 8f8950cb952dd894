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

from services.alerts.conditions import Conditions, Observation
from services.alerts.outbox import Outbox
from services.alerts.settings import AlertSettings
from services.alerts.webhook import Webhook
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
    """The service that is looked at: the names of its actors. `ensemble` is the model name that clients use."""

    ensemble: str
    namespace: str
    coordinators: tuple[str, ...]
    budget: str
    fleet: str
    keys: str


class Alerts:
    """Looks at the service every `interval_s`, and delivers what that gives."""

    def __init__(self, database: str, settings: AlertSettings, watched: Watched) -> None:
        self._settings = settings
        self._outbox = Outbox(Database(database), watched.namespace)
        self._webhooks = [Webhook(url, settings.secret, self._outbox) for url in settings.webhooks]
        self._receivers = [webhook.receiver for webhook in self._webhooks]
        self._outbox.keep_receivers(self._receivers)
        self._conditions = Conditions(
            watched.ensemble, watched.namespace, settings.thresholds, settings.patience_s, self._outbox.levels()
        )
        self._status = Status(
            watched.namespace, watched.coordinators, watched.budget, watched.fleet, TIMEOUT_S, TIMEOUT_S
        )
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
        conditions = self._conditions
        before = dict(conditions.levels)
        alerts = conditions.look(await self._observe(), time.time())
        if not alerts and conditions.levels == before:
            return
        try:
            await asyncio.to_thread(self._outbox.put, alerts, dict(conditions.levels), self._receivers)
        except KeysUnavailable:
            conditions.levels = before  # the next look fires them again
            raise
        for webhook in self._webhooks:
            webhook.wake()

    async def _observe(self) -> Observation:
        troubles, statement, shards, accounts, traffic = await asyncio.gather(
            self._status.troubles(),
            _answer(self._status.statement()),
            _answer(self._status.shards()),
            _answer(self._keys.ask("accounts")),
            _answer(self._keys.ask("traffic")),
        )
        return Observation(
            troubles=troubles,
            statement=statement,
            accounts=accounts or (),
            traffic=traffic,
            shards=shards,
        )


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
