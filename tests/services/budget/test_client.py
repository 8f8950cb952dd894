"""Claim: the budget client charges every token on disk before its release, and loses none of the budget."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from privmix.budget.client import STEPS_AHEAD, BudgetClient
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.foundation.errors import Fenced
from privmix.privacy.events import Event
from tests.services.budget.conftest import ALLOWANCE, Allowance
from tests.services.budget.events import COARSE, FINE

pytestmark = pytest.mark.anyio


@pytest.fixture
async def allowance(allowance: Allowance) -> AsyncIterator[Allowance]:
    """Waits for what a test leaves, because a late lease would reduce the next test's allowance."""
    yield allowance
    await tasks_end()


async def tasks_end() -> None:
    """Waits for the tasks of all clients."""
    if late := [task for task in asyncio.all_tasks() if BudgetClient.__name__ in repr(task.get_coro())]:
        await asyncio.wait(late)


async def take(client: BudgetClient, event: Event, count: int) -> int:
    """Reserves up to `count` tokens and releases all of them."""
    async with client.reserve(event, count) as reserved:
        reserved.mark_released(reserved.count)
    return reserved.count


async def drain(client: BudgetClient, size: Callable[[], int]) -> int:
    """Takes tokens until the client grants none."""
    taken = 0
    while granted := await take(client, COARSE, size()):
        taken += granted
    return taken


@pytest.mark.parametrize("size", [1, 32, 300])
async def test_the_client_spends_the_whole_budget(allowance: Allowance, size: int) -> None:
    client, taken = BudgetClient(allowance.actor, size), 0
    while granted := await take(client, COARSE, random.randint(1, 40)):
        taken += granted
        assert allowance.charged()[COARSE] >= taken, "on disk before their release"
    await tasks_end()
    assert taken == ALLOWANCE
    assert allowance.charged() == {COARSE: ALLOWANCE}


async def test_a_new_event_returns_the_leases_of_the_previous_event(allowance: Allowance) -> None:
    client = BudgetClient(allowance.actor, 20)
    await take(client, COARSE, 15)
    assert await take(client, FINE, 5) == 5
    assert allowance.charged() == {COARSE: 15, FINE: 20}
    await client.settle()
    await tasks_end()
    assert allowance.charged() == {COARSE: 15, FINE: 5}


async def test_two_clients_spend_one_budget(allowance: Allowance) -> None:
    first, second = BudgetClient(allowance.actor, 50), BudgetClient(allowance.actor, 70)
    taken = sum(await asyncio.gather(drain(first, lambda: 2), drain(second, lambda: 3)))
    assert (first.available, second.available) == (0, 0)
    await tasks_end()
    assert taken == ALLOWANCE
    assert allowance.charged() == {COARSE: ALLOWANCE}


async def test_cancellation_loses_no_tokens(allowance: Allowance) -> None:
    async def cancelled_sometimes(take: Callable[[], Awaitable[int]], choice: random.Random) -> int:
        while choice.random() < 0.5:
            waiting = asyncio.ensure_future(take())
            await asyncio.sleep(0)
            if waiting.done():
                return waiting.result()
            waiting.cancel()
            await asyncio.wait([waiting])
        return await take()

    client, choice, taken = BudgetClient(allowance.actor, 10), random.Random(0), 0
    while granted := await cancelled_sometimes(lambda: take(client, COARSE, 4), choice):
        taken += granted
    assert taken == ALLOWANCE


async def test_a_lease_is_settled_when_a_lost_database_is_back(allowance: Allowance) -> None:
    """The settlement was given up, so each outage left up to three leases of each coordinator charged."""
    client = BudgetClient(allowance.actor, 100)
    assert await take(client, COARSE, 7) == 7
    away = allowance.path.rename(allowance.path.with_suffix(".away"))
    settling = asyncio.create_task(client.settle())
    await asyncio.sleep(1)
    assert not settling.done()
    away.rename(allowance.path)
    await settling
    await tasks_end()
    assert allowance.charged() == {COARSE: 7}


async def test_a_failed_ledger_raises_in_every_reservation(allowance: Allowance, roomy: PrivacyBudget) -> None:
    client = BudgetClient(allowance.actor, 20)
    assert await take(client, COARSE, 5) == 5
    successor = Ledger.create(allowance.path, roomy)
    assert await take(client, COARSE, 15) == 15, "these tokens were charged before"
    for _ in range(2):
        with pytest.raises(Fenced):
            await take(client, COARSE, 1)
    successor.give_up()
    assert await take(client, COARSE, 1) == 1


async def test_unreleased_tokens_are_returned(allowance: Allowance) -> None:
    """A failed step releases nothing, so its tokens can be reserved again at no cost."""
    client = BudgetClient(allowance.actor, 20)
    for _ in range(50):
        with pytest.raises(ZeroDivisionError):
            async with client.reserve(COARSE, 15):
                raise ZeroDivisionError
    async with client.reserve(COARSE, 15) as reserved:
        reserved.mark_released(4)
        with pytest.raises(ValueError, match="cannot release 12 more tokens of 15 with 4 released"):
            reserved.mark_released(12)
    await client.settle()
    await tasks_end()
    assert allowance.charged() == {COARSE: 4}


async def test_leases_grow_with_the_steps_up_to_the_need(allowance: Allowance) -> None:
    client = BudgetClient(allowance.actor, 4)
    async with client.reserve(COARSE, 30):
        assert allowance.charged()[COARSE] >= STEPS_AHEAD * 30, "the next step finds its tokens charged"
    await client.settle()
    async with client.reserve(COARSE, 3, upcoming=3):
        assert allowance.charged() == {COARSE: 3}, "the client leases only tokens that a sequence can still use"
    await client.settle()
    await tasks_end()
    assert allowance.charged() == {}


async def test_unused_leases_are_recalled_before_a_refusal(allowance: Allowance) -> None:
    first = BudgetClient(allowance.actor, ALLOWANCE)
    second = BudgetClient(allowance.actor, 50, recall=first.return_unused)
    assert await take(first, COARSE, ALLOWANCE - 30) == ALLOWANCE - 30
    assert first.available == 30
    assert await take(second, COARSE, 20) == 20, "20 of the 30 unused tokens of the first client"
    await second.settle()
    assert await take(first, COARSE, 11) == 10
    await tasks_end()
    assert allowance.charged() == {COARSE: ALLOWANCE}


async def test_a_recall_waits_for_reserved_tokens_and_returns_the_unused_ones(allowance: Allowance) -> None:
    first = BudgetClient(allowance.actor, ALLOWANCE)
    second = BudgetClient(allowance.actor, 1, recall=first.return_unused)
    async with first.reserve(COARSE, ALLOWANCE) as reserved:
        waiting = asyncio.create_task(take(second, COARSE, 5))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        reserved.mark_released(ALLOWANCE - 5)
    assert await waiting == 5
    await tasks_end()
    assert allowance.charged() == {COARSE: ALLOWANCE}


async def test_invalid_sizes_and_counts_are_refused(allowance: Allowance) -> None:
    with pytest.raises(ValueError, match="at least 1 token, not 0"):
        BudgetClient(allowance.actor, 0)
    with pytest.raises(ValueError, match="cannot reserve -1"):
        await take(BudgetClient(allowance.actor), COARSE, -1)
    assert await take(BudgetClient(allowance.actor), COARSE, 0) == 0
