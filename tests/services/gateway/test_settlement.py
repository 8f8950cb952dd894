"""Claim: a request that ends while the keys actor is away is settled when the actor is back."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.exceptions import RayActorError

from privmix.database.service import ServiceDatabase
from privmix.gateway import keys as requests_keys
from privmix.gateway.errors import ApiError
from privmix.gateway.keys import KeyService
from privmix.keys import actor
from privmix.keys.messages import AdmissionLimits, Identity
from privmix.keys.records import Share, ShareUsage
from tests.key_store import RequestStore
from tests.support.ray_cluster import ray_cluster

NAMESPACE = "settlement"
LIMITS = AdmissionLimits(1, max_waiting=1)

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
def cluster() -> Iterator[None]:
    with ray_cluster(1, namespace=NAMESPACE):
        yield


def with_key(place: str, share: Share) -> tuple[RequestStore, Identity]:
    """Returns the keys at a new place with that of "ada", and her identity."""
    store = RequestStore(ServiceDatabase(place))
    key, _ = store.create("ada", share=share)
    return store, Identity(key.id, key.name, key.scopes, share.live_streams)


async def test_an_absent_actor_settles_a_request_when_it_is_back(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settlement was given up, so a share lost the tokens, and the queue a place, until the gateway ended."""
    monkeypatch.setattr(requests_keys, "RETRY_S", 0.1)
    place = str(tmp_path / "keys.db")
    store, identity = with_key(place, Share(tokens=100))
    service = KeyService([], NAMESPACE, actor.NAME)
    first = actor.start(place, namespace=NAMESPACE)
    await service.admit("request", identity, LIMITS, 10, 1)
    ray.kill(first)
    with pytest.raises(RayActorError):
        while True:  # a call that it still hears would settle the request
            await first.ready.remote()
    settling = asyncio.create_task(service.settle("request", 4))
    await asyncio.sleep(1)
    assert not settling.done()
    assert store.account("ada").usage.held == 10
    again = actor.start(place, namespace=NAMESPACE)
    async with asyncio.timeout(60):
        await settling
    assert store.account("ada").usage == ShareUsage(spent=4, spent_today=4)
    await service.admit("next", identity, LIMITS, 96, 1)
    await service.settle("next", 96)
    ray.kill(again)


async def test_a_stopped_actor_that_ray_replaces_admits_nothing_for_a_client_that_has_gone(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray repeats the admission for the restarted actor, after its client got 503."""
    monkeypatch.setattr(requests_keys, "ANSWER_S", 0.5)
    place = str(tmp_path / "keys.db")
    store, identity = with_key(place, Share(tokens=100, live_streams=1))
    service = KeyService([], NAMESPACE, actor.NAME)
    running = actor.start(place, namespace=NAMESPACE)
    process = psutil.Process(await running.__ray_call__.remote(lambda _: os.getpid()))
    process.suspend()
    with pytest.raises(ApiError, match="does not answer"):
        await service.admit("lost", identity, LIMITS, 90, 1)
    process.kill()
    async with asyncio.timeout(60):
        await running.ready.remote()
        while service._background.tasks:
            await asyncio.sleep(0.05)
    assert store.account("ada").usage == ShareUsage()
    assert (await service.admit("next", identity, LIMITS, 100, 1)).tokens == 100
    ray.kill(running)
