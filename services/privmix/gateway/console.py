"""Implements the event stream of the console.

It depends on private text only through the released tokens and their times.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import Context
from typing import Any, Generic, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from privmix.budget.statement import Statement
from privmix.gateway.answers import event
from privmix.gateway.errors import ApiError
from privmix.gateway.keys import KeyService
from privmix.gateway.places import PLACES, Places
from privmix.gateway.served_model import ServedModel
from privmix.gateway.settings import RequestSettings
from privmix.gateway.status import ShardReport
from privmix.gateway.streaming import EventStream
from privmix.keys.actor import Keys
from privmix.keys.messages import Identity
from privmix.keys.traffic import TrafficReport

STREAMS_OF_KEY = 32
INTERVAL_S = 1.0
SHARDS_S = 5.0
LEAST_PAUSE_S = 1.5
PAUSES = 4
"""The pause between two queries is at least this many times the duration of a query, because a statement can take a
second to compute."""

T = TypeVar("T")


class Snapshot(BaseModel):
    """Everything that the console shows at one moment. A field is null if its actor does not answer.

    `at` is in Unix seconds; `models` are the names of the model.
    """

    at: float
    models: tuple[str, ...]
    max_tokens: int
    key: str
    privacy: Statement | None
    traffic: TrafficReport | None
    shards: list[ShardReport] | None


class ConsoleRoutes:
    """Implements `GET /v1/console`, which streams a snapshot every second."""

    def __init__(self, settings: RequestSettings, served: ServedModel, keys: KeyService) -> None:
        self._settings = settings
        self._served = served
        self._keys = keys
        self._statement = _Cached(served.status.statement)
        self._shards = _Cached(served.status.shards, SHARDS_S)
        self._traffic = _Cached(lambda: keys.ask(Keys.traffic), INTERVAL_S / 2)
        message = f"a key may have {STREAMS_OF_KEY} consoles open at a gateway; close one"
        self._streams = Places(STREAMS_OF_KEY, PLACES, (message, "too_many_open_requests"))

    def router(self) -> APIRouter:
        router = APIRouter(tags=["service"])
        router.add_api_route("/v1/console", self.console, methods=["GET"], response_model=Snapshot)
        return router

    async def console(self, request: Request) -> Response:
        """Stream a snapshot every second as server-sent events, for the console."""
        identity = await self._keys.identify(request)
        snapshots = self._snapshots(request, identity)
        return EventStream(await anext(snapshots), snapshots, {})

    async def _snapshots(self, request: Request, identity: Identity) -> AsyncGenerator[bytes, None]:
        with self._streams.taken(identity.id):
            while True:
                yield event((await self._snapshot(identity)).model_dump_json().encode())
                await asyncio.sleep(INTERVAL_S)
                try:
                    identity = await self._keys.identify(request)
                except ApiError:  # The key was revoked. The page reconnects and gets the error.
                    return

    async def _snapshot(self, identity: Identity) -> Snapshot:
        privacy, traffic, shards = await asyncio.gather(self._statement.get(), self._traffic.get(), self._shards.get())
        return Snapshot(
            at=time.time(),
            models=self._served.ensemble.names,
            max_tokens=self._settings.max_tokens,
            key=identity.name,
            privacy=privacy,
            traffic=traffic,
            shards=shards,
        )


class _Cached(Generic[T]):
    """Caches the result of a query and refreshes it in the background when it is old. None if the query fails."""

    def __init__(self, query: Callable[[], Awaitable[T]], pause_s: float = LEAST_PAUSE_S) -> None:
        self._query = query
        self._pause_s = pause_s
        self._due = 0.0
        self._result: T | None = None
        self._refreshing: asyncio.Task[None] | None = None

    async def get(self) -> T | None:
        """Returns the latest result. Waits for a query only if there is no result."""
        if self._refreshing is None and time.monotonic() >= self._due:
            # In a new context, because Ray cancels all calls of a cancelled request's context.
            self._refreshing = asyncio.create_task(self._refresh(), context=Context())
        if self._result is None and self._refreshing is not None:
            await asyncio.shield(self._refreshing)
        return self._result

    async def _refresh(self) -> None:
        started = time.monotonic()
        try:
            self._result = await _result_or_none(self._query)
        finally:
            now = time.monotonic()
            self._due = now + max(self._pause_s, PAUSES * (now - started))
            self._refreshing = None


async def _result_or_none(query: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await query()
    except ApiError:
        return None
