"""Claim: the keys actor charges shares exactly, with concurrent clients and after failures of gateways and itself."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from services.keys import actor as keys_actor
from services.keys.actor import Keys
from services.keys.messages import (
    AdmissionLimits,
    Admitted,
    EnsembleTraffic,
    Identity,
    InvalidKey,
    Refused,
    TrafficUpdate,
)
from services.keys.records import KeyAccount, Secret, Share
from services.keys.usage import usage_by_key

pytestmark = pytest.mark.anyio

GATEWAY = "gateway"


class KeysOfOneEnsemble(Keys):
    """Implements the actor of a service with one ensemble."""

    def __init__(self, place: str, capacity: int) -> None:
        super().__init__(place)
        self._room = AdmissionLimits("privmix", capacity, max_waiting=1000)

    async def request(
        self, id_: str, subjects: Sequence[str], wanted: int, generations: int, gateway: str, background: bool = False
    ) -> Admitted | Refused:
        return await self.admit(id_, subjects, self._room, wanted, generations, gateway, background)


def start(place: str, capacity: int = 1000) -> KeysOfOneEnsemble:
    return KeysOfOneEnsemble(place, capacity)


async def new_key(keys: KeysOfOneEnsemble, name: str, share: Share, group: str | None = None) -> Identity:
    _, secret = await keys.create(name, "", group, ("generate",), None, share)
    identity = await keys.identify(Secret(secret).hash)
    assert isinstance(identity, Identity)
    return identity


async def admitted(keys: KeysOfOneEnsemble, id_: str, subjects: Sequence[str], wanted: int) -> int:
    outcome = await keys.request(id_, subjects, wanted, 1, GATEWAY)
    assert isinstance(outcome, Admitted)
    return outcome.tokens


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
            outcome = await keys.request(id_, identity.subjects, generator.randint(1, 12), 1, GATEWAY)
            if isinstance(outcome, Refused):
                refusals.append((outcome.reason, released[name]))
                return
            await asyncio.sleep(generator.random() * 0.002)
            used = generator.randint(0, outcome.tokens)
            released[name] += used
            await keys.settle(id_, used)

    await asyncio.gather(*(client(number) for number in range(50)))
    accounts = await keys.accounts()
    assert {account.key.name: account.usage.spent for account in accounts} == released
    assert sum(released.values()) == budget
    for account in accounts:
        assert account.share.tokens == share
        assert account.usage.spent + account.usage.held == share
    assert refusals == [("share_exhausted", share)] * 50, "no request is refused while its share has tokens left"


async def test_keys_of_a_group_share_its_tokens(place: str) -> None:
    keys = start(place)
    members = [await new_key(keys, name, Share(tokens=30), group="lab") for name in ("a", "b")]
    await keys.limit_group("lab", Share(tokens=40))
    assert await admitted(keys, "a", members[0].subjects, 100) == 30
    await keys.settle("a", 30)
    assert await admitted(keys, "b", members[1].subjects, 100) == 10


async def test_a_request_that_its_share_can_never_admit_is_refused_at_once(place: str) -> None:
    keys = start(place)
    identity = await new_key(keys, "k", Share(tokens_per_minute=50, largest_request=40, live_streams=2))
    for wanted, generations, reason in ((41, 1, "request_too_large"), (1, 3, "more_than_live_streams")):
        refused = await keys.request("a", identity.subjects, wanted, generations, GATEWAY)
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.retry_after_s) == (reason, None)
    assert (await keys.account("k")).usage.charged == 0


async def test_live_streams_are_counted_and_released(place: str) -> None:
    keys = start(place)
    identity = await new_key(keys, "k", Share(live_streams=2))
    await keys.request("a", identity.subjects, 1, 2, GATEWAY)
    refused = await keys.request("b", identity.subjects, 1, 1, GATEWAY)
    assert isinstance(refused, Refused)
    assert refused.reason == "live_streams"
    await keys.settle("a", 1)
    await admitted(keys, "b", identity.subjects, 1)


async def test_a_client_that_leaves_while_it_waits_costs_nothing(place: str) -> None:
    keys = start(place, capacity=1)
    identity = await new_key(keys, "k", Share(tokens=10))
    await admitted(keys, "first", identity.subjects, 4)
    waits_for_capacity = asyncio.create_task(keys.request("second", identity.subjects, 2, 1, GATEWAY))
    waits_for_tokens = asyncio.create_task(keys.request("third", identity.subjects, 9, 1, GATEWAY))
    await asyncio.sleep(0.1)
    assert not waits_for_capacity.done()
    assert not waits_for_tokens.done()
    await keys.settle("second", 0)
    await keys.settle("third", 0)
    usage = (await keys.account("k")).usage
    assert (usage.spent, usage.held) == (0, 4)
    await keys.settle("first", 4)
    assert await admitted(keys, "fourth", identity.subjects, 100) == 6


async def test_a_background_request_holds_no_tokens_while_it_waits(place: str) -> None:
    keys = start(place, capacity=2)
    identity = await new_key(keys, "k", Share(tokens=10, live_streams=2))
    await admitted(keys, "person", identity.subjects, 6)
    await keys.request("line", identity.subjects, 2, 1, GATEWAY, background=True)
    waiting = asyncio.create_task(keys.request("behind", identity.subjects, 2, 1, GATEWAY, background=True))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert (await keys.account("k")).usage.held == 8
    await keys.settle("line", 2)
    assert isinstance(await waiting, Admitted)
    await keys.settle("behind", 2)
    refused = await keys.request("large", identity.subjects, 5, 1, GATEWAY, background=True)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.retry_after_s) == ("overloaded", 1.0), (
        "waiting with a place in the queue could deadlock"
    )
    await keys.settle("person", 4)
    assert await admitted(keys, "last", identity.subjects, 9) == 2


async def test_a_restarted_actor_continues_from_the_database(place: str) -> None:
    before = start(place, capacity=1)
    identity = await new_key(before, "k", Share(tokens=10))
    await admitted(before, "a", identity.subjects, 6)
    after = start(place, capacity=1)
    assert await admitted(after, "a", identity.subjects, 6) == 6, "Ray repeats calls after a restart"
    waiting = asyncio.create_task(after.request("b", identity.subjects, 4, 1, GATEWAY))
    await asyncio.sleep(0.1)
    assert not waiting.done(), "the first request still runs"
    await after.settle("a", 5)
    await waiting
    usage = (await after.account("k")).usage
    assert (usage.spent, usage.held) == (5, 4)


async def test_tokens_that_a_lost_gateway_held_stay_charged(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_actor, "WATCH_S", 0.02)
    monkeypatch.setattr(keys_actor, "HEARTBEAT_TIMEOUT_S", 0.3)
    keys = start(place)
    identity = await new_key(keys, "k", Share(tokens=10))
    await keys.request("lost", identity.subjects, 6, 1, "gone")
    await keys.request("kept", identity.subjects, 4, 1, "here")
    for _ in range(30):
        await keys.heartbeat("here", TrafficUpdate())
        await asyncio.sleep(0.02)
    usage = (await keys.account("k")).usage
    assert (usage.spent, usage.held) == (6, 4)


async def test_a_larger_share_wakes_waiting_requests(place: str) -> None:
    keys = start(place)
    identity = await new_key(keys, "k", Share(tokens=5))
    await admitted(keys, "a", identity.subjects, 5)
    waiting = asyncio.create_task(keys.request("b", identity.subjects, 5, 1, GATEWAY))
    await asyncio.sleep(0.05)
    account: KeyAccount = await keys.limit("k", Share(tokens=50))
    assert account.share.tokens == 50
    outcome = await asyncio.wait_for(waiting, 5)
    assert isinstance(outcome, Admitted)
    assert outcome.tokens == 5


async def test_only_valid_keys_are_identified(place: str) -> None:
    keys = start(place)
    assert await keys.identify(None) == InvalidKey("unknown", required=False)
    key, secret = await keys.create("k", "", None, ("administer",), None, Share())
    assert await keys.identify(None) == InvalidKey("unknown")
    assert await keys.identify(Secret(secret).hash) == Identity(key.id, "k", ("administer",), (f"key:{key.id}",))
    await keys.revoke("k")
    assert await keys.identify(Secret(secret).hash) == InvalidKey("revoked")


async def test_traffic_updates_add_up(place: str) -> None:
    keys = start(place)
    first = TrafficUpdate(requests=3, refusals={"a": 1}, ensembles={"clinic": EnsembleTraffic(2, 30, [0.1, 0.3])})
    second = TrafficUpdate(
        requests=1,
        refusals={"a": 1, "b": 2},
        ensembles={"clinic": EnsembleTraffic(1, 4), "court": EnsembleTraffic(0, 6, [0.2])},
    )
    await keys.heartbeat("gateway-1", first)
    await keys.heartbeat("gateway-2", second)
    report = await keys.traffic()
    assert (report.live, report.tokens, report.requests, report.gateways) == (3, 40, 4, 2)
    assert (report.first_token_s, report.first_token_worst_s) == (0.2, 0.3)
    assert report.refusals == {"a": 2, "b": 2}
    assert sum(report.tokens_each_second) == 40
    clinic, court = await keys.traffic("clinic"), await keys.traffic("court")
    assert (clinic.live, clinic.tokens, clinic.gateways) == (3, 34, 2)
    assert (court.live, court.tokens, court.gateways) == (0, 6, 1)
    assert (await keys.traffic("without-requests")).tokens == 0


CLINIC, COURT = AdmissionLimits("clinic", 1, 10, shares="clinic"), AdmissionLimits("court", 1, 10, shares="court")


async def test_a_share_of_one_ensemble_pays_for_that_ensemble_alone(place: str) -> None:
    keys = start(place)
    identity = await new_key(keys, "k", Share(tokens=10), group="lab")
    await keys.limit("k", Share(tokens=4), "clinic")
    await keys.limit_group("lab", Share(tokens=5), "court")
    for id_, limits, granted in (("a", CLINIC, 4), ("b", COURT, 5)):
        outcome = await keys.admit(id_, identity.subjects, limits, 100, 1, GATEWAY)
        assert isinstance(outcome, Admitted)
        assert outcome.tokens == granted
        await keys.settle(id_, granted)
    account = await keys.account("k")
    assert account.usage.spent == 9, "the share of all ensembles counts both"
    assert {name: part.usage.spent for name, part in account.ensembles.items()} == {"clinic": 4, "court": 5}
    assert account.group_ensembles["court"].share == Share(tokens=5)
    refused = await keys.admit("c", identity.subjects, CLINIC, 1, 1, GATEWAY)
    assert isinstance(refused, Refused)
    assert refused.reason == "share_exhausted"
    assert {key.name: key.usage.spent for key in usage_by_key(place, "clinic")} == {"k": 4}
    assert [key.usage.spent for key in usage_by_key(place)] == [0], "no tokens of an ensemble without its own shares"


async def test_a_full_ensemble_does_not_delay_another(place: str) -> None:
    keys = start(place)
    identity = await new_key(keys, "k", Share())
    await keys.admit("a", identity.subjects, CLINIC, 1, 1, GATEWAY)
    waiting = asyncio.create_task(keys.admit("b", identity.subjects, CLINIC, 1, 1, GATEWAY))
    assert isinstance(await keys.admit("c", identity.subjects, COURT, 1, 1, GATEWAY), Admitted)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert (await keys.traffic("clinic")).waiting == 1
    assert (await keys.traffic("court")).waiting == 0
    await keys.settle("b", 0)
    assert waiting.cancelled()
    restarted = start(place)
    waiting = asyncio.create_task(restarted.admit("d", identity.subjects, CLINIC, 1, 1, GATEWAY))
    await asyncio.sleep(0.05)
    assert not waiting.done(), "a restarted actor knows the running requests of each ensemble"
    await restarted.settle("a", 1)
    assert isinstance(await waiting, Admitted)
