"""Claim: an actor or a database that hangs neither blocks a client for ever nor leaves the service looking ready."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.exceptions import RayTaskError

from privmix.database.service import ServiceDatabase
from privmix.foundation.errors import KeysError
from privmix.gateway import preparation
from privmix.gateway.keys import KeyService
from privmix.gateway.status import Status
from privmix.keys import actor as keys_actor
from privmix.keys import grouping
from privmix.keys.actor import Keys
from privmix.keys.store import KeyStore
from tests.support.app import MakeClient, app_client


class Handle:
    """Calls an actor's methods in this process, as a Ray handle calls those of an actor elsewhere."""

    def __init__(self, actor: object) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> "Handle":
        return Handle(getattr(self._actor, method))

    async def remote(self, *arguments: object, **named: object) -> Any:
        try:
            return await self._actor(*arguments, **named)  # type: ignore[operator]
        except KeysError as error:
            raise RayTaskError("method", "traceback", error) from error


BODIES = {
    "/v1/completions": json.dumps({"model": "privmix", "prompt": "Hello"}),
    "/tokenize": json.dumps({"prompt": "Hello"}),
}


@pytest.mark.anyio
@pytest.mark.parametrize("path", BODIES)
async def test_a_key_that_is_revoked_while_it_sends_a_body_is_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, admitted, begun, going = str(tmp_path / "keys.db"), list[object](), asyncio.Event(), asyncio.Event()
    store = KeyStore(ServiceDatabase(place))
    _, secret = store.create("hers")
    keys = Handle(Keys(place))

    async def find(_: KeyService, name: str) -> Handle:
        return keys

    async def admit(_: Keys, *arguments: object) -> None:
        admitted.append(arguments)

    async def held_back() -> AsyncIterator[bytes]:
        begun.set()
        await going.wait()
        yield BODIES[path].encode()

    monkeypatch.setattr(KeyService, "_find", find)
    monkeypatch.setattr(Keys, "admit", admit)
    monkeypatch.setattr(keys_actor, "IDENTITY_AGE_S", 0)
    app: Any = app_client(keys_actor="keys").app
    headers = {"authorization": f"Bearer {secret.text}", "content-type": "application/json"}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000") as http,
    ):
        answer = asyncio.create_task(http.post(path, content=held_back(), headers=headers))
        await asyncio.wait_for(begun.wait(), 10)
        store.revoke("hers")
        going.set()
        refused = await asyncio.wait_for(answer, 30)
    assert refused.status_code == 401
    assert not admitted
    assert [account.key.name for account in store.accounts()] == ["hers"]


@pytest.mark.anyio
@pytest.mark.parametrize("path", BODIES)
async def test_a_body_that_does_not_come_is_given_up(
    path: str, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stalled() -> AsyncIterator[bytes]:
        yield b"-"
        await asyncio.Event().wait()

    monkeypatch.setattr(preparation, "BODY_S", 0.1)
    app = make_client().app
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000") as http:
        answer = await asyncio.wait_for(
            http.post(path, content=stalled(), headers={"content-type": "application/json"}), 30
        )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (408, "body_too_slow", "body")


def test_a_service_whose_keys_are_locked_or_gone_is_not_ready(
    make_client: MakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, actors = tmp_path / "keys.db", list[Keys]()

    async def find(_: KeyService, name: str) -> Handle:
        if not actors:
            actors.append(Keys(str(place)))  # in the application's event loop
        return Handle(actors[0])

    async def no_troubles(_: Status) -> dict[str, str]:
        return {}

    monkeypatch.setattr(KeyService, "_find", find)
    monkeypatch.setattr(Status, "troubles", no_troubles)
    client = make_client(keys_actor="keys")
    assert client.get("/readyz").status_code == 200
    monkeypatch.setattr(grouping, "DATABASE_TIMEOUT_S", 0.3)
    with closing(sqlite3.connect(place, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert client.get("/readyz").status_code == 503
        assert client.get("/health").json()["missing"] == ["keys"]
        other.execute("ROLLBACK")
    monkeypatch.setattr(grouping, "DATABASE_TIMEOUT_S", 10.0)
    assert client.get("/readyz").status_code == 200
    for file in tmp_path.iterdir():
        file.unlink()
    assert client.get("/readyz").status_code == 503
