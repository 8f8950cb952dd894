"""Claim: the keys actor charges shares exactly, with concurrent clients and after failures of gateways and itself."""

import asyncio
import random
import sqlite3
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event

from privmix.database.service import ServiceDatabase
from privmix.foundation.errors import KeysUnavailable
from privmix.keys import actor as keys_actor
from privmix.keys import grouping, open_requests
from privmix.keys.actor import Keys
from privmix.keys.grouping import Work
from privmix.keys.messages import AdmissionLimits, Admitted, Identity, InvalidKey, Refused, TrafficUpdate
from privmix.keys.records import Share
from tests.key_store import RequestStore
from tests.support.waiting import becoming

pytestmark = pytest.mark.anyio

GATEWAY = "gateway"


class KeysOfService(Keys):
    """Implements the actor of a service with a capacity."""

    def __init__(self, place: str, capacity: int, namespace: str) -> None:
        super().__init__(place, namespace)
        self.store = RequestStore(ServiceDatabase(place))
        self._room = AdmissionLimits(capacity, max_waiting=1000)

    async def request(
        self, id_: str, identity: Identity, wanted: int, generations: int, gateway: str
    ) -> Admitted | Refused:
        return await self.admit(id_, identity, self._room, wanted, generations, gateway)


def start(place: str, capacity: int = 1000, namespace: str = "privmix") -> KeysOfService:
    return KeysOfService(place, capacity, namespace)


async def new_key(keys: KeysOfService, name: str, share: Share) -> Identity:
    _, secret = keys.store.create(name, share=share)
    identity = await keys.identify(secret.hash)
    assert isinstance(identity, Identity)
    return identity


async def admitted(keys: KeysOfService, id_: str, identity: Identity, wanted: int) -> int:
    outcome = await keys.request(id_, identity, wanted, 1, GATEWAY)
    assert isinstance(outcome, Admitted)
    return outcome.tokens


def in_queue(keys: Keys) -> int:
    """Returns how many generations wait for capacity."""
    return keys._open.queue.waiting


def for_tokens(keys: Keys) -> int:
    """Returns how many requests wait for tokens of their shares."""
    return keys._open._waiting.total()


def counted(keys: Keys) -> list[None]:
    """Returns a list that grows with each transaction of the actor."""
    commits: list[None] = []
    event.listen(keys._transactions._database._database._engine, "commit", lambda _: commits.append(None))
    return commits


async def test_fifty_concurrent_clients_on_ten_keys_spend_each_share_exactly(place: str) -> None:
    keys = start(place, capacity=24)
    budget, share = 10 * 60, 60
    names = [f"key-{number}" for number in range(10)]
    identities = [await new_key(keys, name, Share(tokens=share)) for name in names]
    generator = random.Random(7)
    released = dict.fromkeys(names, 0)
    refusals: list[tuple[str, int]] = []

    async def client(number: int) -> None:
        identity, name = identities[number % 10], names[number % 10]
        for attempt in range(100):
            id_ = f"{number}-{attempt}"
            outcome = await keys.request(id_, identity, generator.randint(1, 12), 1, GATEWAY)
            if isinstance(outcome, Refused):
                refusals.append((outcome.reason, released[name]))
                return
            await asyncio.sleep(generator.random() * 0.002)
            used = generator.randint(0, outcome.tokens)
            released[name] += used
            await keys.settle(id_, used)

    await asyncio.gather(*(client(number) for number in range(50)))
    accounts = keys.store.accounts()
    assert {account.key.name: account.usage.spent for account in accounts} == released
    assert sum(released.values()) == budget
    for account in accounts:
        assert account.key.share.tokens == share
        assert account.usage.spent + account.usage.held == share
    assert refusals == [("share_exhausted", share)] * 50, "no request is refused while its share has tokens left"


async def test_live_streams_are_counted_and_released(place: str) -> None:
    keys = start(place)
    identity = await new_key(keys, "k", Share(live_streams=2))
    assert await keys.request("too large", identity, 1, 3, GATEWAY) == Refused("request_too_large", 2)
    await keys.request("a", identity, 1, 2, GATEWAY)
    assert await keys.request("b", identity, 1, 1, GATEWAY) == Refused("live_streams", 2)
    await keys.settle("a", 1)
    await admitted(keys, "b", identity, 1)


async def test_a_request_leaves_places_for_another_key(place: str) -> None:
    keys = start(place, capacity=8)
    large, small = [await new_key(keys, name, Share(tokens=100)) for name in ("large", "small")]
    assert await keys.request("too large", large, 16, 5, GATEWAY) == Refused("request_too_large", 4)
    assert await keys.request("large", large, 16, 4, GATEWAY) == Admitted(16)
    assert await admitted(keys, "small", small, 1) == 1
    assert keys._open.queue.live == 5
    await keys.settle("large", 8)
    assert keys._open.queue.live == 1
    assert keys.store.account("large").usage.spent == 8


async def test_one_key_cannot_occupy_the_actor_while_it_waits_for_its_share(place: str) -> None:
    keys = start(place)
    limits = AdmissionLimits(1000, max_waiting=8)
    identity = await new_key(keys, "k", Share(tokens=5))
    held = await keys.admit("held", identity, limits, 5, 1, GATEWAY)
    assert isinstance(held, Admitted)
    waiting = [asyncio.create_task(keys.admit(f"{n}", identity, limits, 5, 1, GATEWAY)) for n in range(6)]
    async with asyncio.timeout(30):
        while len(refused := [task.result() for task in waiting if task.done()]) < 4:
            await asyncio.sleep(0.05)
    assert [outcome.reason for outcome in refused if isinstance(outcome, Refused)] == ["overloaded"] * 4
    await keys.settle("held", 5)
    assert isinstance((await asyncio.gather(*waiting))[0], Refused)
    assert for_tokens(keys) == 0, "the key may wait again"


async def test_a_request_that_the_full_queue_refuses_costs_nothing(place: str) -> None:
    keys = start(place)
    identity = await new_key(keys, "k", Share(tokens=10))
    limits = AdmissionLimits(1, max_waiting=0)
    assert await keys.admit("runs", identity, limits, 4, 1, GATEWAY) == Admitted(4)
    refused = await keys.admit("refused", identity, limits, 4, 1, GATEWAY)
    assert isinstance(refused, Refused)
    assert refused.reason == "overloaded"
    usage = keys.store.account("k").usage
    assert (usage.spent, usage.held) == (0, 4)


async def test_a_database_that_hangs_is_given_up_and_settled_later(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = start(place, capacity=1)
    identity = await new_key(keys, "k", Share(tokens=10))
    await admitted(keys, "before", identity, 4)
    monkeypatch.setattr(open_requests, "RETRY_S", 0.05)
    with monkeypatch.context() as impatient, closing(sqlite3.connect(place, isolation_level=None)) as hanging:
        for module in (grouping, open_requests):  # a busy machine may need as long while the database works
            impatient.setattr(module, "DATABASE_TIMEOUT_S", 0.3)
        hanging.execute("BEGIN EXCLUSIVE")
        with pytest.raises(KeysUnavailable, match="does not answer"):
            await keys.health()
        with pytest.raises(KeysUnavailable):
            await keys.identify("0" * 64)
        with pytest.raises(KeysUnavailable):
            await keys.request("meanwhile", identity, 2, 1, GATEWAY)
        await keys.settle("before", 3)
        hanging.execute("ROLLBACK")
    while (usage := keys.store.account("k").usage).held:
        await asyncio.sleep(0.05)
    assert (usage.spent, usage.held) == (3, 0)
    await keys.health()
    assert await admitted(keys, "after", identity, 20) == 7, "capacity and share are free again"


async def test_a_settlement_that_was_not_confirmed_wakes_the_requests_that_wait_for_its_tokens(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repeated one finds nothing to settle."""
    keys = start(place)
    identity = await new_key(keys, "k", Share(tokens=5))
    await admitted(keys, "held", identity, 5)
    waiting = asyncio.create_task(keys.request("waits", identity, 5, 1, GATEWAY))
    await becoming(lambda: for_tokens(keys) == 1)
    monkeypatch.setattr(open_requests, "RETRY_S", 0.05)
    transactions, lost = keys._transactions, iter([KeysUnavailable("the commit was not confirmed")])
    run = transactions.run

    async def run_unconfirmed(work: Work[Any]) -> Any:
        result = await run(work)
        for error in lost:
            raise error
        return result

    monkeypatch.setattr(transactions, "run", run_unconfirmed)
    await keys.settle("held", 2)
    async with asyncio.timeout(30):
        assert await waiting == Admitted(3)


async def test_refused_clients_share_a_transaction_and_need_none_once_keys_are_required(place: str) -> None:
    """A client with an unknown key, or with none, used to cost a transaction of its own under the lock of all."""
    keys = start(place)
    commits = counted(keys)
    assert (
        await asyncio.gather(*(keys.identify(None) for _ in range(100)))
        == [InvalidKey("unknown", required=False)] * 100
    )
    assert len(commits) <= 3
    await new_key(keys, "k", Share())
    assert await keys.identify(None) == InvalidKey("unknown", required=True)
    commits.clear()
    assert (
        await asyncio.gather(*(keys.identify(None) for _ in range(100))) == [InvalidKey("unknown", required=True)] * 100
    )
    assert not commits
    await asyncio.gather(*(keys.identify(f"{n:064x}") for n in range(100)))
    assert len(commits) <= 3


async def test_only_valid_keys_are_identified(place: str) -> None:
    keys = start(place)
    assert await keys.identify(None) == InvalidKey("unknown", required=False)
    key, secret = keys.store.create("k", share=Share(live_streams=3))
    assert await keys.identify(None) == InvalidKey("unknown")
    assert await keys.identify(secret.hash) == Identity(key.id, "k", live_streams=3)
    keys.store.revoke("k")
    await asyncio.sleep(keys_actor.IDENTITY_AGE_S)
    assert await keys.identify(secret.hash) == InvalidKey("revoked")


async def test_a_client_that_leaves_while_it_waits_costs_nothing(place: str) -> None:
    keys = start(place, capacity=1)
    identity = await new_key(keys, "k", Share(tokens=10))
    await admitted(keys, "first", identity, 4)
    waits_for_capacity = asyncio.create_task(keys.request("second", identity, 2, 1, GATEWAY))
    waits_for_tokens = asyncio.create_task(keys.request("third", identity, 9, 1, GATEWAY))
    await becoming(lambda: in_queue(keys) == for_tokens(keys) == 1)
    assert not waits_for_capacity.done()
    assert not waits_for_tokens.done()
    await keys.settle("second", 0)
    await keys.settle("third", 0)
    usage = keys.store.account("k").usage
    assert (usage.spent, usage.held) == (0, 4)
    await keys.settle("first", 4)
    assert await admitted(keys, "fourth", identity, 100) == 6


async def test_a_restarted_actor_continues_from_the_database(place: str) -> None:
    before = start(place, capacity=1)
    identity = await new_key(before, "k", Share(tokens=10))
    await admitted(before, "a", identity, 6)
    after = start(place, capacity=1)
    assert await admitted(after, "a", identity, 6) == 6, "Ray repeats calls after a restart"
    waiting = asyncio.create_task(after.request("b", identity, 4, 1, GATEWAY))
    await becoming(lambda: in_queue(after) == 1)
    assert not waiting.done(), "the first request still runs"
    await after.settle("a", 5)
    await waiting
    usage = after.store.account("k").usage
    assert (usage.spent, usage.held) == (5, 4)


async def test_tokens_that_a_lost_gateway_held_stay_charged(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(keys_actor, "WATCH_S", 0.02)
    monkeypatch.setattr(keys_actor, "time", SimpleNamespace(monotonic=lambda: clock))
    keys = start(place)
    identity = await new_key(keys, "k", Share(tokens=10))
    await keys.request("lost", identity, 6, 1, "gone")
    await keys.request("kept", identity, 4, 1, "here")
    clock = keys_actor.HEARTBEAT_TIMEOUT_S
    await keys.heartbeat("here", TrafficUpdate())
    clock += 1
    await becoming(lambda: "lost" not in keys._open._requests)
    while not (usage := keys.store.account("k").usage).spent:
        await asyncio.sleep(0.01)
    assert (usage.spent, usage.held) == (6, 4)


async def test_services_on_one_database_leave_each_others_requests_alone(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_actor, "WATCH_S", 0.02)
    monkeypatch.setattr(keys_actor, "HEARTBEAT_TIMEOUT_S", 0.0)
    first = start(place)
    monkeypatch.setattr(first, "_tend", asyncio.Event().wait)
    identity = await new_key(first, "k", Share(tokens=10))
    await first.request("open", identity, 6, 1, GATEWAY)
    second = start(place, capacity=1, namespace="another")
    await second.request("lost", identity, 3, 1, GATEWAY)
    await becoming(lambda: not second._open._requests)
    while not (usage := first.store.account("k").usage).spent:
        await asyncio.sleep(0.01)
    assert (usage.spent, usage.held) == (3, 6)
    await first.settle("open", 1)
    assert first.store.account("k").usage.spent == 4


async def test_traffic_updates_add_up(place: str) -> None:
    keys = start(place)
    first = TrafficUpdate(refusals={"a": 1}, live=2, tokens=30)
    second = TrafficUpdate(refusals={"a": 1, "b": 2}, live=1, tokens=10)
    await keys.heartbeat("gateway-1", first)
    await keys.heartbeat("gateway-2", second)
    report = await keys.traffic()
    assert (report.live, report.timeline[-1][1]) == (3, 40)
    assert report.refusals == {"a": 2, "b": 2}
    assert sum(report.tokens_each_second) == 40
