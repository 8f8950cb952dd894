"""Claim: tokens that are paid for are not given up while a shard that holds their weights lives, nor with another's."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import GetTimeoutError

from privmix.coordinator import group
from privmix.coordinator.copies import ShardCopies
from privmix.coordinator.group import Group
from privmix.coordinator.held_weights import HeldWeights, weigh
from privmix.coordinator.step import PartlySampled, Step
from privmix.fleet.shard_map import PartGroup
from privmix.foundation.errors import CoordinatorUnavailable
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocols.pmixed import PMixed
from privmix.shards.line import LineAddress, LineServer
from privmix.shards.sessions import Asked

PATIENCE_S = 0.05
TOTAL = 1000
SEQUENCES = tuple(f"text-{index}" for index in range(8))

ASKED: Any = "what is asked"
ABSENT: Any = None

Pick = Callable[[np.ndarray], Awaitable[np.ndarray]]


class Copy:
    """Stands for the handle of a shard whose weights are equal, so that a point is its token."""

    def __init__(self, pick: Pick) -> None:
        self.weigh = SimpleNamespace(remote=self._weigh)
        self.pick = SimpleNamespace(remote=lambda _key, points, _: asyncio.ensure_future(pick(points)))

    def _weigh(self, asked: Asked) -> Awaitable[tuple[np.ndarray, None]]:
        answered: asyncio.Future[tuple[np.ndarray, None]] = asyncio.get_running_loop().create_future()
        answered.set_result((np.full(len(asked.sequences), TOTAL), None))
        return answered


async def at_once(points: np.ndarray) -> np.ndarray:
    return points


async def late(points: np.ndarray) -> np.ndarray:
    await asyncio.sleep(3 * PATIENCE_S)
    return points


async def dead(points: np.ndarray) -> np.ndarray:
    raise CoordinatorUnavailable("the shard has lost the weights")


async def held(picks: dict[str, Pick], monkeypatch: pytest.MonkeyPatch) -> HeldWeights:
    """Returns a step whose sequences are spread over copies that pick like this."""
    monkeypatch.setattr(group, "_caller", lambda: "caller")
    handles: dict[str, Any] = {name: Copy(pick) for name, pick in picks.items()}
    protocol = PMixed(2, 1.0, 0.4)
    parts = PartGroup(0, {0: "part-0", 1: "part-1"}, tuple(handles))
    copies = Group(parts, protocol, ShardCopies(tuple(handles), handles.__getitem__, PATIENCE_S))
    count = len(SEQUENCES)
    contexts, options, draws = ((1, 2),) * count, (SamplingOptions(),) * count, ((0,),) * count
    step = Step(SEQUENCES, contexts, tuple(map(len, contexts)), (None,) * count, options, draws)
    result = await weigh([copies], 10.0, step)
    assert len(result.held) == 2, "both copies have sequences"
    return result


def test_a_copy_that_is_lost_takes_no_tokens_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other may first ingest long prompts of another coordinator, for longer than a copy is waited for usually."""

    async def run() -> None:
        result = await held({"a": dead, "b": late}, monkeypatch)
        with pytest.raises(PartlySampled) as raised:
            await result.sample(range(len(SEQUENCES)), ())
        (kept,) = (each.batch.places for each in result.held if each.copy == 1)
        assert sorted(raised.value.tokens) == list(kept)

    asyncio.run(run())


def test_who_waits_for_tokens_of_the_step_before_does_not_give_them_up() -> None:
    async def run() -> None:
        parts = Group(PartGroup(0, {0: "part-0"}, ("a",)), PMixed(1, 1.0, 0.4), ShardCopies(("a",), ABSENT, 10.0))
        step = Step(("x",), ((1, 2),), (3,), (None,), (SamplingOptions(),), ((0,),))
        picking = asyncio.get_running_loop().create_future()
        parts.picking = ("w", "x"), picking
        given_up, waiting = (asyncio.create_task(parts.picked(step)) for _ in range(2))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0)
        picking.set_result({0: 7, 1: 8})
        assert await waiting == {"w": 7, "x": 8}

    asyncio.run(run())


def test_another_copy_answers_where_ray_cannot_find_one_because_its_head_node_is_away() -> None:
    def find(name: str) -> Any:
        if name == "a":
            raise GetTimeoutError
        return Copy(at_once)

    async def run() -> None:
        asked: Any = SimpleNamespace(sequences=SEQUENCES)
        copy, _ = await ShardCopies(("a", "b"), find, 10.0).first((0, 1), "weigh", lambda _: asked)
        assert copy == 1

    asyncio.run(run())


def test_a_lost_connection_is_one_failed_call_and_the_next_one_connects_again() -> None:
    answer = SimpleNamespace(weigh=lambda asked: asked)

    async def run() -> None:
        servers = [LineServer(answer, ThreadPoolExecutor(1), "127.0.0.1") for _ in range(2)]
        addresses = iter([server.address for server in servers])

        async def line() -> LineAddress:
            return next(addresses)

        handle: Any = SimpleNamespace(line=SimpleNamespace(remote=line))
        copies = ShardCopies(("a",), lambda _: handle, 10.0, lines=True)

        async def weighed() -> Any:
            _, answered = await copies.first((0,), "weigh", lambda _: ASKED)
            return answered

        assert list(await asyncio.gather(weighed(), weighed())) == [ASKED, ASKED], "calls share a connection"
        copies.close()
        with pytest.raises(CoordinatorUnavailable, match="does not answer: ConnectionResetError"):
            await weighed()
        assert await weighed() == ASKED

    asyncio.run(run())
