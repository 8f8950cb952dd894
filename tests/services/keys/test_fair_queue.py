"""Claim: the capacity is shared fairly among keys, not among requests."""

import asyncio

import pytest

from privmix.keys.fair_queue import RECENT_S, FairQueue
from privmix.keys.messages import AdmissionLimits

pytestmark = pytest.mark.anyio


def asked(queue: FairQueue, key: str, times: int, generations: int = 1) -> list[asyncio.Task[bool]]:
    return [asyncio.create_task(queue.acquire(key, generations)) for _ in range(times)]


async def left(tasks: list[asyncio.Task[bool]]) -> None:
    """Lets those who asked leave."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_keys_that_ask_for_much_leave_room_for_others() -> None:
    now = 1000.0
    queue = FairQueue(AdmissionLimits(64, 1000), clock=lambda: now)
    await queue.acquire("light", 1)
    queue.free("light", 1)
    tasks = asked(queue, "long", 80) + asked(queue, "other", 80)
    await asyncio.sleep(0)
    started = [sum(task.done() for task in tasks[:80]), sum(task.done() for task in tasks[80:])]
    assert started == [48, 12]
    for _ in range(2):
        await asyncio.wait_for(queue.acquire("light", 1), 0.01)
    await left(tasks)


@pytest.mark.parametrize(("long", "other"), [("a", "b"), ("b", "a")])
async def test_a_key_that_filled_the_capacity_alone_leaves_room_once_another_asks(long: str, other: str) -> None:
    now = 1000.0
    queue = FairQueue(AdmissionLimits(8, 100), clock=lambda: now)
    tasks = asked(queue, long, 9)
    await asyncio.sleep(0)
    now += 2 * RECENT_S
    late = asyncio.create_task(queue.acquire(other, 1))
    await asyncio.sleep(0)
    queue.free(long, 1)
    await late
    queue.free(long, 1)
    await asyncio.sleep(0)
    assert (sum(task.done() for task in tasks), queue.live) == (8, 7)
    await left(tasks)


async def test_a_key_that_asks_alone_has_the_whole_capacity() -> None:
    now = 1000.0
    queue = FairQueue(AdmissionLimits(8, 100), clock=lambda: now)
    await queue.acquire("light", 1)
    queue.free("light", 1)
    tasks = asked(queue, "long", 12)
    await asyncio.sleep(0)
    assert sum(task.done() for task in tasks) == 6, "the other key asked just before"
    now += RECENT_S
    queue.free("long", 1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert queue.live == 8
    queue.free("long", 8)
    await asyncio.gather(*tasks[:9])
    await left(tasks)


async def test_keys_with_equal_demand_alternate() -> None:
    queue = FairQueue(AdmissionLimits(1, 1000))
    order: list[str] = []
    await queue.acquire("first", 1)

    async def run(key: str) -> None:
        await queue.acquire(key, 1)
        order.append(key)
        queue.free(key, 1)

    tasks = [asyncio.create_task(run(key)) for key in "aaaabbbbcccc"]
    await asyncio.sleep(0)
    queue.free("first", 1)
    await asyncio.gather(*tasks)
    assert "".join(order) == "abcabcabcabc"


async def test_a_cancelled_request_leaks_no_capacity() -> None:
    queue = FairQueue(AdmissionLimits(2, 10))
    await queue.acquire("a", 2)
    cancelled = asked(queue, "b", 2)
    remaining = asyncio.create_task(queue.acquire("c", 2))
    await asyncio.sleep(0)
    cancelled[0].cancel()
    queue.free("a", 2)
    cancelled[1].cancel()
    await left(cancelled)
    await asyncio.wait_for(remaining, 60)
    assert (queue.live, queue.waiting) == (2, 0)


async def test_a_request_beyond_the_waiting_limit_is_refused() -> None:
    queue = FairQueue(AdmissionLimits(2, max_waiting=8))
    await queue.acquire("a", 2)
    waiting = [asyncio.create_task(queue.acquire(key, 2)) for key in "abcd"]
    await asyncio.sleep(0)
    assert not await queue.acquire("e", 1)
    assert queue.waiting == 8
    for key in "abcd":
        queue.free("a" if key == "a" else chr(ord(key) - 1), 2)
        await asyncio.sleep(0)
    assert [await task for task in waiting] == [True] * 4


async def test_a_capacity_that_became_smaller_lets_requests_run_alone() -> None:
    queue = FairQueue(AdmissionLimits(8, 100))
    assert await queue.acquire("a", 4)
    queue.limits = AdmissionLimits(2, 100)
    waiting = [asyncio.create_task(queue.acquire(key, generations)) for key, generations in (("b", 4), ("c", 1))]
    await asyncio.sleep(0)
    queue.free("a", 4)
    assert await waiting[0]
    assert not waiting[1].done()
    queue.free("b", 4)
    assert await waiting[1]
    assert (queue.live, queue.waiting) == (1, 0)


async def test_a_key_cannot_fill_the_waiting_places() -> None:
    queue = FairQueue(AdmissionLimits(2, max_waiting=8))
    await queue.acquire("busy", 2)
    waiting = asked(queue, "busy", 2)
    await asyncio.sleep(0)
    assert not await queue.acquire("busy", 1)
    other = asyncio.create_task(queue.acquire("other", 1))
    await asyncio.sleep(0)
    queue.free("busy", 1)
    await asyncio.wait_for(other, 60)
    assert not any(task.done() for task in waiting)
    await left(waiting)
