"""What the console shows, as a stream of events. No number here depends on the private text, except through the tokens
that were released and the times in which they were."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import Context
from importlib.metadata import version
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from services.budget.statement import Statement
from services.budget.together import together
from services.ensembles.records import State
from services.gateway.errors import ApiError
from services.gateway.keys import KeyService
from services.gateway.openapi import REFUSALS
from services.gateway.served import Models, Served
from services.gateway.settings import GatewaySettings
from services.gateway.sse import EventStream, events
from services.gateway.status import Shard
from services.keys.messages import Identity
from services.keys.records import KeyAccount
from services.keys.traffic import TrafficReport

INTERVAL_S = 1.0
SHARDS_S = 5.0
LEAST_PAUSE_S = 1.5
PAUSES = 4
"""A statement may take a second to compose: it is asked for again after this many times as long as it took."""

T = TypeVar("T")


class Snapshot(BaseModel):
    """Everything that the console shows at one moment; None is what does not answer. Times are Unix seconds.

    `privacy`, `traffic` and `shards` are those of `model`, one of `ensembles`. `together` is what they promise to a
    person whose text is in all of them.
    """

    at: float
    version: str
    models: tuple[str, ...]
    ensembles: tuple[str, ...]
    model: str
    state: State
    together: str | None
    max_tokens: int
    key: str
    scopes: tuple[str, ...]
    privacy: Statement | None
    traffic: TrafficReport | None
    shards: list[Shard] | None
    keys: list[KeyAccount] | None


class ConsoleRoutes:
    """`GET /v1/console`: a snapshot a second, for as long as it is read."""

    def __init__(self, settings: GatewaySettings, models: Models, keys: KeyService) -> None:
        self._settings = settings
        self._models = models
        self._keys = keys
        self._watched: WeakKeyDictionary[Served, _Watched] = WeakKeyDictionary()

    def router(self) -> APIRouter:
        router = APIRouter(tags=["service"], responses=REFUSALS)
        router.add_api_route("/v1/console", self.console, methods=["GET"], response_model=Snapshot)
        return router

    async def console(self, request: Request, model: str | None = None) -> Response:
        """Server-sent events, a snapshot of a model each second, as the console draws it."""
        identity = await self._keys.identify(request, "privacy")
        snapshots = self._snapshots(request, identity, model)
        return EventStream(await anext(snapshots), snapshots, {})

    async def _snapshots(self, request: Request, identity: Identity, model: str | None) -> AsyncGenerator[bytes, None]:
        while True:
            yield events([await self._snapshot(identity, model)])
            await asyncio.sleep(INTERVAL_S)
            try:
                identity = await self._keys.identify(request, "privacy")
                self._models.named(model)
            except ApiError:  # revoked or retired meanwhile: the page asks again, and is told so
                return

    async def _snapshot(self, identity: Identity, model: str | None) -> Snapshot:
        administers = "administer" in identity.scopes
        served = self._models.named(model)
        watched = self._watch(served)
        traffic, shards, accounts, *statements = await asyncio.gather(
            watched.traffic.get(),
            watched.shards.get(),
            _answer(lambda: self._keys.ask("accounts")) if administers else _nothing(),
            *(self._watch(each).statement.get() for each in self._models.all),
        )
        stated = {each.ensemble.name: one for each, one in zip(self._models.all, statements, strict=True)}
        known = {name: one for name, one in stated.items() if one is not None}
        return Snapshot(
            at=time.time(),
            version=version("privmix"),
            models=self._models.names,
            ensembles=tuple(each.ensemble.name for each in self._models.all),
            model=served.ensemble.name,
            state=served.state,
            together=together(known).guarantee if len(known) > 1 else None,
            max_tokens=self._settings.max_tokens,
            key=identity.name,
            scopes=identity.scopes,
            privacy=stated.get(served.ensemble.name),
            traffic=traffic,
            shards=shards,
            keys=accounts,
        )

    def _watch(self, served: Served) -> "_Watched":
        if served not in self._watched:
            self._watched[served] = _Watched(served, self._keys)
        return self._watched[served]


class _Watched:
    """What is asked about one model, once for all who watch."""

    def __init__(self, served: Served, keys: KeyService) -> None:
        name = served.ensemble.name

        async def asked_traffic() -> TrafficReport:
            report: TrafficReport = await keys.ask("traffic", name)
            return report

        self.statement = _Recent(served.status.statement)
        self.shards = _Recent(served.status.shards, SHARDS_S)
        self.traffic = _Recent(asked_traffic, INTERVAL_S / 2)


class _Recent(Generic[T]):
    """An answer that all who watch share, asked for again when it is old; None while there is none."""

    def __init__(self, ask: Callable[[], Awaitable[T]], pause_s: float = LEAST_PAUSE_S) -> None:
        self._ask = ask
        self._pause_s = pause_s
        self._due = 0.0
        self._answer: T | None = None
        self._asking: asyncio.Task[None] | None = None

    async def get(self) -> T | None:
        """The latest answer; waits for one only where there has been none."""
        if self._asking is None and time.monotonic() >= self._due:
            # It outlives this request: Ray cancels with a call whatever was called in its context.
            self._asking = asyncio.create_task(self._again(), context=Context())
        if self._answer is None and self._asking is not None:
            await asyncio.shield(self._asking)
        return self._answer

    async def _again(self) -> None:
        started = time.monotonic()
        try:
            self._answer = await _answer(self._ask)
        finally:
            now = time.monotonic()
            self._due = now + max(self._pause_s, PAUSES * (now - started))
            self._asking = None


async def _answer(ask: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await ask()
    except ApiError:
        return None


async def _nothing() -> None: ...
