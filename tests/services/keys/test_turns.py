"""Places are shared among keys, not among requests."""

import asyncio
from contextlib import suppress

import pytest

from services.keys.turns import QueueFull, Turns

pytestmark = pytest.mark.anyio


async def test_a_greedy_key_does_not_keep_others_waiting() -> None:
    turns = Turns(capacity=4, max_waiting=1000)
    order: list[str] = []

    async def ask(key: str) -> None:
        await turns.take(key, 1)
        order.append(key)
        await asyncio.sleep(0.01)
        turns.give_back(key, 1)

    greedy = [asyncio.create_task(ask("greedy")) for _ in range(40)]
    await asyncio.sleep(0)
    modest = [asyncio.create_task(ask("modest")) for _ in range(4)]
    await asyncio.gather(*greedy, *modest)
    assert max(place for place, key in enumerate(order) if key == "modest") < 12
    assert (turns.live, turns.waiting) == (0, 0)


async def test_keys_of_equal_hunger_get_equal_places() -> None:
    turns = Turns(capacity=1, max_waiting=1000)
    order: list[str] = []
    await turns.take("first", 1)

    async def ask(key: str) -> None:
        await turns.take(key, 1)
        order.append(key)
        turns.give_back(key, 1)

    asking = [asyncio.create_task(ask(key)) for key in "aaaabbbbcccc"]
    await asyncio.sleep(0)
    turns.give_back("first", 1)
    await asyncio.gather(*asking)
    assert "".join(order) == "abcabcabcabc"


async def test_a_request_that_leaves_loses_no_place() -> None:
    turns = Turns(capacity=2, max_waiting=10)
    await turns.take("a", 2)
    leaving = [asyncio.create_task(turns.take("b", 1)) for _ in range(2)]
    staying = asyncio.create_task(turns.take("c", 2))
    await asyncio.sleep(0)
    leaving[0].cancel()
    turns.give_back("a", 2)
    leaving[1].cancel()
    for task in leaving:
        with suppress(asyncio.CancelledError):
            await task
    await asyncio.wait_for(staying, 1)
    assert (turns.live, turns.waiting) == (2, 0)


async def test_too_many_that_wait_are_refused() -> None:
    turns = Turns(capacity=1, max_waiting=2)
    await turns.take("a", 1)
    waiting = asyncio.create_task(turns.take("a", 2))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await turns.take("b", 1)
    turns.give_back("a", 1)
    await waiting


async def test_a_request_larger_than_the_service_runs_alone() -> None:
    turns = Turns(capacity=4, max_waiting=100)
    await turns.take("a", 9)
    small = asyncio.create_task(turns.take("b", 1))
    await asyncio.sleep(0)
    assert not small.done()
    turns.give_back("a", 9)
    await small


async def test_the_background_goes_after_all_others_and_leaves_half_of_the_places() -> None:
    turns = Turns(capacity=4, max_waiting=100)
    behind = [asyncio.create_task(turns.take("batch", 1, background=True)) for _ in range(6)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [each.done() for each in behind] == [True, True, False, False, False, False]
    assert turns.waiting == 0, "what waits in the background refuses no one"
    for _ in range(2):
        await turns.take("person", 1)
    waits = asyncio.create_task(turns.take("person", 1))
    await asyncio.sleep(0)
    turns.give_back("batch", 1, background=True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert waits.done(), "a person waited, so the free place was hers"
    assert not behind[2].done()
    turns.give_back("person", 1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert behind[2].done()
    for each in behind[3:]:
        each.cancel()
        with suppress(asyncio.CancelledError):
            await each
    for _ in range(2):
        turns.give_back("person", 1)
        turns.give_back("batch", 1, background=True)
    assert (turns.live, turns.waiting) == (0, 0)


async def test_a_large_request_of_the_background_runs_alone() -> None:
    turns = Turns(capacity=4, max_waiting=100)
    await turns.take("person", 1)
    large = asyncio.create_task(turns.take("batch", 9, background=True))
    await asyncio.sleep(0)
    assert not large.done()
    turns.give_back("person", 1)
    await large
    assert turns.live == 9
