"""Claim: a request pays its key's share what it used, and one whose client has gone without an answer holds nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError

from privmix.coordinator.messages import Delta, Generation
from privmix.database.service import ServiceDatabase
from privmix.foundation.errors import KeysError
from privmix.gateway import keys as request_keys
from privmix.gateway.admission import admitted
from privmix.gateway.coordinator_client import OnEnd
from privmix.gateway.counters import Counters
from privmix.gateway.errors import ApiError
from privmix.gateway.keys import KeyService
from privmix.gateway.response_queue import ResponseQueue
from privmix.gateway.settings import RequestSettings
from privmix.keys import actor as keys_actor
from privmix.keys.actor import Keys
from privmix.keys.messages import AdmissionLimits, Admitted, Identity, TrafficUpdate
from privmix.keys.records import Share, ShareUsage
from privmix.privacy.mollifiers.shaping import SamplingOptions
from tests.key_store import RequestStore
from tests.support.waiting import becoming

LIMITS = AdmissionLimits(8, max_waiting=8)
SILENT_S = 0.5
"""A busy machine answers a heartbeat within this time."""

pytestmark = pytest.mark.anyio


class Actor:
    """Calls a keys actor as Ray does: it keeps calls while the actor is away, and repeats those without an answer.

    A caller that no longer waits for a call does not end it.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self.calls: list[str] = []
        self.gone = False
        self.back()

    def back(self) -> None:
        """Starts the actor, with what the database holds."""
        self.keys = Keys(self.place)
        self.keys._watching.cancel()
        self.alive, self.dead = True, asyncio.get_running_loop().create_future()

    def away(self, *, for_ever: bool = False) -> None:
        """Ends the actor, which answers nothing any more."""
        self.alive, self.gone = False, for_ever
        self.dead.set_result(None)

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: object) -> Awaitable[object]:
            call = asyncio.ensure_future(self._call(method, *arguments))
            call.add_done_callback(lambda call: call.cancelled() or call.exception())  # also if nobody waits
            return asyncio.shield(call)

        return SimpleNamespace(remote=remote)

    async def _call(self, method: str, *arguments: object) -> object:
        self.calls.append(method)
        while not self.gone:
            if self.alive:
                work = asyncio.ensure_future(getattr(self.keys, method)(*arguments))
                await asyncio.wait((work, self.dead), return_when=asyncio.FIRST_COMPLETED)
                if not self.dead.done():
                    return _result(work)
            await asyncio.sleep(0.01)
        raise ActorDiedError


def _result(work: asyncio.Future[object]) -> object:
    if work.cancelled():
        raise TaskCancelledError
    try:
        return work.result()
    except KeysError as error:
        raise RayTaskError("method", "traceback", error) from error


class World:
    """A gateway's service of keys, its actor, and a key with a share of 100 tokens and 4 live streams."""

    def __init__(self, place: str) -> None:
        self.store = RequestStore(ServiceDatabase(place))
        key, secret = self.store.create("ada", share=Share(tokens=100, live_streams=4))
        self.identity = Identity(key.id, key.name, key.share.live_streams)
        self.secret = secret.text
        self.actor = Actor(place)
        settings: Any = RequestSettings  # no model is served
        self.service = KeyService(settings.model_construct(keys_actor="keys"))
        self.service._find = self._find  # type: ignore[method-assign]
        self.client: Any = SimpleNamespace()

    async def _find(self, name: str) -> Any:
        return self.actor

    async def identify(self) -> Identity:
        return self.identity

    def admit(self, id_: str, wanted: int = 30, generations: int = 1) -> Awaitable[Admitted]:
        return self.service.admit(id_, self.identity, LIMITS, wanted, generations, self.identify)

    def submitted(self, *limits: int) -> AbstractAsyncContextManager[ResponseQueue]:
        """Admits a request with these limits of its generations, whose ids count from 0."""
        served: Any = SimpleNamespace(client=self.client, ensemble=SimpleNamespace(admission_limits=LIMITS))
        generations = [Generation(f"{number}", (1,), SamplingOptions(), limit) for number, limit in enumerate(limits)]
        return admitted(served, self.service, self.identity, generations, self.identify)

    async def submit(self) -> None:
        async with self.submitted(30):
            pass

    def held(self) -> tuple[int, int, int, int]:
        """Returns the tokens, the live streams and the places that requests hold, and how many wait for a place."""
        open_ = self.actor.keys._open
        queue = open_.queue
        return (
            self.store.account("ada").usage.held,
            sum(request.generations for request in open_._requests.values()),
            queue.live,
            queue.waiting + open_._waiting.total(),
        )

    async def holds_nothing(self) -> None:
        """Waits until requests hold nothing, and a while to see that it stays so."""
        await becoming(lambda: self.held() == (0, 0, 0, 0) and not self.service._background.tasks)
        await asyncio.sleep(2 * SILENT_S)
        assert self.held() == (0, 0, 0, 0)
        assert not self.actor.keys._open._requests


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    for name, seconds in {"SILENT_S": SILENT_S, "RETRY_S": 0.05, "HEARTBEAT_S": 0.02}.items():
        monkeypatch.setattr(request_keys, name, seconds)
    world = World(str(tmp_path / "keys.db"))
    heartbeats = asyncio.create_task(world.service.send_heartbeats(TrafficUpdate))
    yield world
    heartbeats.cancel()


class Coordinators:
    """Stands for a gateway's client of coordinators, which start nothing."""

    def __init__(self) -> None:
        self.started: dict[str, int | None] = {}

    @asynccontextmanager
    async def submit(
        self, generations: Sequence[Generation], *, truncated: frozenset[str], on_end: OnEnd
    ) -> AsyncIterator[ResponseQueue]:
        self.started = {generation.id: generation.max_charged for generation in generations}
        queue = ResponseQueue(generations, 60.0, Counters(), truncated)
        try:
            yield queue
        finally:
            await on_end(queue.charged)


async def test_a_share_shortens_the_answers_of_a_request_evenly_and_pays_what_they_used(world: World) -> None:
    world.client = coordinators = Coordinators()
    async with world.submitted(30, 80) as queue:
        assert coordinators.started == {"0": None, "1": 70}
        assert world.held() == (100, 2, 2, 0)
        for delta in (Delta("0", "a", (1, 2)), Delta("0", "", finish_reason="length"), Delta("1", "b", (3,), "length")):
            queue.put(delta)
        assert [delta.finish_reason for delta in await queue.take()] == [None, "length", "share"]
    await world.holds_nothing()
    assert world.store.account("ada").usage.spent == 3


async def test_a_request_that_ends_while_the_actor_is_away_is_settled_when_it_is_back(world: World) -> None:
    await world.admit("request", 10)
    world.actor.away()
    settling = asyncio.create_task(world.service.settle("request", 4))
    await asyncio.sleep(2 * SILENT_S)
    assert not settling.done()
    assert world.held() == (10, 1, 1, 0)
    world.actor.back()
    await settling
    assert world.store.account("ada").usage == ShareUsage(spent=4)


async def test_an_answer_for_which_a_share_has_no_token_never_starts(world: World) -> None:
    world.client = coordinators = Coordinators()
    await world.admit("before", 99)
    await world.service.settle("before", None)
    async with world.submitted(5, 5) as queue:
        assert coordinators.started == {"1": 1}
        assert [(delta.id, delta.finish_reason) for delta in await queue.take()] == [("0", "share")]
    await world.holds_nothing()
    assert world.store.account("ada").usage.spent == 99


async def test_a_client_that_leaves_pays_what_was_charged_and_no_more(world: World) -> None:
    world.client = Coordinators()
    left = asyncio.Event()

    async def client() -> None:
        async with world.submitted(30) as queue:
            queue.put(Delta("0", "a", (1, 2)))
            left.set()
            await asyncio.Event().wait()

    leaving = asyncio.create_task(client())
    await left.wait()
    leaving.cancel()
    await asyncio.wait([leaving])
    await world.holds_nothing()
    assert world.store.account("ada").usage.spent == 2


async def test_a_key_that_is_revoked_while_its_request_waits_starts_and_pays_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_actor, "IDENTITY_AGE_S", 0)
    monkeypatch.setattr(world, "identify", lambda: world.service._identity(world.secret))
    world.client = coordinators = Coordinators()
    await world.admit("running", 90)
    waiting = asyncio.ensure_future(world.submit())
    while not world.held()[-1]:
        await asyncio.sleep(0)
    world.store.revoke("ada")
    await world.service.settle("running", 90)
    with pytest.raises(ApiError, match="was revoked"):
        await waiting
    await world.holds_nothing()
    assert world.store.account("ada").usage.spent == 90
    assert not coordinators.started


async def test_a_request_waits_for_its_share_longer_than_for_an_answer(world: World) -> None:
    await world.admit("running", 100)
    waiting = asyncio.ensure_future(world.admit("waits"))
    await asyncio.sleep(5 * SILENT_S)
    assert not waiting.done(), "the actor works"
    await world.service.settle("running", 60)
    assert (await waiting).tokens == 30


async def unanswered(work: Awaitable[object]) -> None:
    with pytest.raises(ApiError, match="does not answer") as refused:
        await work
    assert (refused.value.status, refused.value.headers) == (503, {"retry-after": "5"})


async def test_an_admission_whose_client_got_503_is_withdrawn_when_the_actor_is_back(world: World) -> None:
    """The actor admitted it for nobody, and only the end of the gateway ended it: the key's next requests waited."""
    world.actor.away()
    for _ in range(3):
        await unanswered(world.submit())
    await unanswered(world.service.ask(Keys.identify, None))
    world.actor.back()
    await world.holds_nothing()
    assert (await world.admit("next", 100)).tokens == 100


async def test_an_admission_whose_client_left_while_the_actor_was_away_is_withdrawn(world: World) -> None:
    world.actor.away()
    leaving = asyncio.create_task(world.submit())
    await asyncio.sleep(SILENT_S / 2)
    leaving.cancel()
    await asyncio.wait([leaving])
    assert leaving.cancelled()
    await asyncio.sleep(2 * SILENT_S)
    world.actor.back()
    await world.holds_nothing()


async def test_an_admission_is_withdrawn_while_it_would_wait_for_its_share_or_a_place(world: World) -> None:
    """A withdrawal that waits for the call's answer would wait as long as the request."""
    await world.admit("running", 90)
    world.actor.away()
    await unanswered(world.admit("waits for the share", 90))
    world.actor.back()
    await becoming(lambda: not world.service._background.tasks)
    assert world.held() == (90, 1, 1, 0)
    await world.service.settle("running", 90)
    await world.holds_nothing()


async def test_an_admission_is_withdrawn_although_the_actor_restarts_again(world: World) -> None:
    world.actor.away()
    await unanswered(world.admit("lost"))
    for pause_s in (0.0, 0.01, 0.02, 0.05):
        world.actor.back()
        await asyncio.sleep(pause_s)
        world.actor.away()
        await asyncio.sleep(2 * SILENT_S)
    world.actor.back()
    await world.holds_nothing()


@pytest.mark.parametrize("for_ever", [False, True])
async def test_an_admission_that_a_former_actor_made_is_withdrawn(world: World, for_ever: bool) -> None:
    """Its answer was lost, and the actor, or its successor, does not come before the client is refused."""
    admitting = asyncio.ensure_future(world.admit("lost"))
    while not world.store.account("ada").usage.held:
        await asyncio.sleep(0)
    world.actor.away(for_ever=for_ever)
    await unanswered(admitting)
    assert world.store.account("ada").usage.held == 30
    if for_ever:
        world.actor = Actor(world.actor.place)
    else:
        world.actor.back()
    await world.holds_nothing()


async def test_a_refused_request_needs_no_withdrawal(world: World) -> None:
    with pytest.raises(ApiError, match="a request of this key may have 4"):
        await world.admit("refused", generations=5)
    assert not world.service._background.tasks
    assert "settle" not in world.actor.calls
