"""What the console shows, as a stream of events. No number here depends on the private text, except through the tokens
that were released and the times in which they were."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import Context
from importlib.metadata import version
from typing import Any, Generic, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from services.budget.statement import Statement
from services.gateway.errors import ApiError
from services.gateway.keys import KeyService
from services.gateway.openapi import REFUSALS
from services.gateway.settings import GatewaySettings
from services.gateway.sse import EventStream, events
from services.gateway.status import Shard, Status
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
    """Everything that the console shows at one moment; None is what does not answer. Times are Unix seconds."""

    at: float
    version: str
    models: tuple[str, ...]
    max_tokens: int
    key: str
    scopes: tuple[str, ...]
    privacy: Statement | None
    traffic: TrafficReport | None
    shards: list[Shard] | None
    keys: list[KeyAccount] | None


class ConsoleRoutes:
    """`GET /v1/console`: a snapshot a second, for as long as it is read."""

    def __init__(self, settings: GatewaySettings, status: Status, keys: KeyService) -> None:
        self._settings = settings
        self._keys = keys
        self._statement = _Recent(status.statement)
        self._shards = _Recent(status.shards, SHARDS_S)
        self._traffic = _Recent(self._asked_traffic, INTERVAL_S / 2)

    def router(self) -> APIRouter:
        router = APIRouter(tags=["service"], responses=REFUSALS)
        router.add_api_route("/v1/console", self.console, methods=["GET"], response_model=Snapshot)
        return router

    async def console(self, request: Request) -> Response:
        """Server-sent events, a snapshot each second; what the console draws. Keys are there for administrators."""
        identity = await self._keys.identify(request, "privacy")
        snapshots = self._snapshots(request, identity)
        return EventStream(await anext(snapshots), snapshots, {})

    async def _snapshots(self, request: Request, identity: Identity) -> AsyncGenerator[bytes, None]:
        while True:
            yield events([await self._snapshot(identity)])
            await asyncio.sleep(INTERVAL_S)
            try:
                identity = await self._keys.identify(request, "privacy")
            except ApiError:  # revoked meanwhile: the page asks again, and is told so
                return

    async def _snapshot(self, identity: Identity) -> Snapshot:
        administers = "administer" in identity.scopes
        statement, traffic, shards, accounts = await asyncio.gather(
            self._statement.get(),
            self._traffic.get(),
            self._shards.get(),
            _answer(lambda: self._keys.ask("accounts")) if administers else _nothing(),
        )
        return Snapshot(
            at=time.time(),
            version=version("privmix"),
            models=self._settings.served_model_names,
            max_tokens=self._settings.max_tokens,
            key=identity.name,
            scopes=identity.scopes,
            privacy=statement,
            traffic=traffic,
            shards=shards,
            keys=accounts,
        )

    async def _asked_traffic(self) -> TrafficReport:
        report: TrafficReport = await self._keys.ask("traffic")
        return report


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
