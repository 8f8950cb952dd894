"""Claim: one key leaves places of a gateway for the others, also if it holds its bodies back or opens many consoles."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Message

from privmix.gateway import console, keys
from tests.support.app import app_client

PLACES = 3
JSON = {"content-type": "application/json"}


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_key_that_holds_bodies_back_leaves_places(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, going = asyncio.Semaphore(0), asyncio.Event()

    async def held_back() -> AsyncIterator[bytes]:
        begun.release()
        await going.wait()
        yield b"{}"

    monkeypatch.setattr(keys, "PLACES_OF_KEY", PLACES)
    app = app_client(api_keys=("hers", "his")).app
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:

        async def answered(key: str) -> tuple[int, str]:
            answer = await http.post(path, content=b"{}", headers={**headers(key), **JSON})
            return answer.status_code, answer.json()["error"]["code"]

        held = [
            asyncio.create_task(http.post(path, content=held_back(), headers={**headers("hers"), **JSON}))
            for _ in range(PLACES)
        ]
        for _ in held:
            await asyncio.wait_for(begun.acquire(), 10)
        refused, other = await answered("hers"), await answered("his")
        going.set()
        ended = [(await answer).status_code for answer in held]
        again = await answered("hers")
    assert refused == (429, "too_many_open_requests")
    assert other == again
    assert {other[0], again[0], *ended} == {400}


@pytest.mark.anyio
async def test_a_key_that_opens_consoles_leaves_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "STREAMS_OF_KEY", PLACES)
    app: Any = app_client(api_keys=("hers", "his")).app

    async def open_console(key: str) -> tuple[int, asyncio.Task[None]]:
        """Returns the status, and the stream, which lasts until it is cancelled."""
        status = asyncio.get_running_loop().create_future()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                status.set_result(message["status"])

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        sent = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "method": "GET", "path": "/v1/console", "query_string": b"", "headers": sent}
        stream = asyncio.ensure_future(app({**scope, "client": None}, receive, send))
        return await asyncio.wait_for(status, 30), stream

    async with app.router.lifespan_context(app):
        opened = [await open_console("hers") for _ in range(PLACES)]
        refused, other = await open_console("hers"), await open_console("his")
        opened[0][1].cancel()
        await asyncio.gather(opened[0][1], return_exceptions=True)
        again = await open_console("hers")
        streams = [stream for _, stream in (*opened, refused, other, again)]
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    assert [status for status, _ in (*opened, other, again)] == [200] * (PLACES + 2)
    assert refused[0] == 429
