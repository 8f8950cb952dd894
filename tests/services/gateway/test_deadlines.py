"""Claim: an actor or a database that hangs neither blocks a client for ever nor leaves the service looking ready."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from privmix.services.batches.settings import BatchSettings
from privmix.services.database import deadline
from privmix.services.foundation.errors import KeysError
from privmix.services.gateway import batches as batch_routes
from privmix.services.keys.actor import Keys
from privmix.services.keys.messages import AdmissionLimits, Admitted, RateStates
from privmix.services.requests import keys as request_keys
from privmix.services.requests.errors import ApiError
from privmix.services.requests.keys import ANONYMOUS, KeyService
from privmix.services.requests.status import Status
from tests.support.app import MakeClient, app_client

ANSWER_S = 0.2
LIMITS = AdmissionLimits("privmix", 1, max_waiting=1)


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


class Busy:
    """A keys actor that works. Its queue is full for a second."""

    async def ready(self) -> None: ...

    async def admit(self, *_: object) -> Admitted:
        await asyncio.sleep(1)
        return Admitted(1, RateStates(None, None), 1)


class Hung(Busy):
    """An actor that accepts calls and never answers one."""

    async def ready(self, *_: object, **__: object) -> None:
        await asyncio.Event().wait()

    admit = settle = files = serving = heartbeat = ready  # type: ignore[assignment]


@pytest.fixture
def answer_s(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    for module in (request_keys, batch_routes):
        monkeypatch.setattr(module, "ANSWER_S", ANSWER_S)
    yield ANSWER_S


def service(actor: object) -> KeyService:
    keys = KeyService((), "a-namespace-without-actors", "keys")
    keys._handle = Handle(actor)
    return keys


@pytest.mark.anyio
async def test_a_request_waits_in_the_queue_of_a_working_actor(answer_s: float) -> None:
    assert (await service(Busy()).admit("a", ANONYMOUS, LIMITS, 1, 1)).tokens == 1, "for longer than a deadline"


@pytest.mark.anyio
async def test_a_request_does_not_wait_for_an_actor_that_hangs(answer_s: float) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(ApiError, match="does not answer within"):
            await service(Hung()).admit("a", ANONYMOUS, LIMITS, 1, 1)


def test_a_batches_actor_that_hangs_is_given_up(answer_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.get_actor", lambda *_: Handle(Hung()))
    with app_client(BatchSettings(), batches_actor="batches", keys_actor=None) as client:
        answer = client.get("/v1/files")
    assert answer.status_code == 503
    assert "does not answer within" in answer.json()["error"]["message"]


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
    monkeypatch.setattr(deadline, "DATABASE_TIMEOUT_S", 0.3)
    with closing(sqlite3.connect(place, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert client.get("/readyz").status_code == 503
        assert client.get("/health").json()["missing"] == ["keys"]
        other.execute("ROLLBACK")
    monkeypatch.setattr(deadline, "DATABASE_TIMEOUT_S", 10.0)
    assert client.get("/readyz").status_code == 200
    for file in tmp_path.iterdir():
        file.unlink()
    assert client.get("/readyz").status_code == 503
