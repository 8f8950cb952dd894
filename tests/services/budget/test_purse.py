"""The purse: every token it hands out was charged on disk before, and none of the budget is lost in it."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
import ray

from services.budget.errors import Fenced
from services.budget.ledger import Ledger
from services.budget.privacy_budget import PrivacyBudget
from services.budget.purse import Purse
from services.budget.reader import read
from tests.services.budget.conftest import ALLOWANCE, Allowance
from tests.services.budget.events import COARSE, FINE


async def drain(purse: Purse, size: Callable[[], int]) -> int:
    """Takes until not one token is granted."""
    taken = 0
    while granted := await purse.take(COARSE, size()):
        taken += granted
    return taken


@pytest.mark.parametrize("size", [1, 32, 300])
def test_it_spends_the_budget_to_the_last_token(allowance: Allowance, size: int) -> None:
    async def spend() -> int:
        return await drain(Purse(allowance.actor, size), lambda: random.randint(1, 40))

    assert asyncio.run(spend()) == ALLOWANCE
    assert allowance.charged() == {COARSE: ALLOWANCE}


def test_what_it_hands_out_is_charged_on_disk(allowance: Allowance) -> None:
    async def spend() -> None:
        purse, taken = Purse(allowance.actor, 20), 0
        for _ in range(30):
            taken += await purse.take(COARSE, 7)
            assert allowance.charged()[COARSE] >= taken

    asyncio.run(spend())


def test_settled_it_leaves_charged_what_was_taken(allowance: Allowance) -> None:
    async def spend() -> None:
        purse = Purse(allowance.actor, 20)
        assert await purse.take(COARSE, 15) == 15
        await purse.settle()
        assert purse.available == 0
        assert allowance.charged() == {COARSE: 15}
        assert await purse.take(COARSE, 15) == 15, "it goes on when it is needed again"
        await purse.settle()

    asyncio.run(spend())
    assert allowance.charged() == {COARSE: 30}


def test_it_closes_the_leases_that_it_has_used_up(allowance: Allowance) -> None:
    held = read(allowance.path).held

    async def spend() -> None:
        purse = Purse(allowance.actor, 20)
        for _ in range(10):
            await purse.take(COARSE, 10)
        await purse.settle()

    asyncio.run(spend())
    assert allowance.charged() == {COARSE: 100}
    assert read(allowance.path).held == held


def test_it_orders_before_it_is_empty(allowance: Allowance) -> None:
    async def spend() -> None:
        purse = Purse(allowance.actor, 20)
        await purse.take(COARSE, 11)
        while purse.available == 9:
            await asyncio.sleep(0.01)
        assert purse.available == 29

    asyncio.run(spend())


def test_another_event_sends_back_what_was_leased_for_the_one_before(allowance: Allowance) -> None:
    async def spend() -> None:
        purse = Purse(allowance.actor, 20)
        await purse.take(COARSE, 15)
        assert await purse.take(FINE, 5) == 5
        assert allowance.charged() == {COARSE: 15, FINE: 20}
        await purse.settle()

    asyncio.run(spend())
    assert allowance.charged() == {COARSE: 15, FINE: 5}


def test_many_at_once_share_it(allowance: Allowance) -> None:
    async def spend() -> int:
        purse = Purse(allowance.actor, 16)
        return sum(await asyncio.gather(*(purse.take(COARSE, 3) for _ in range(100))))

    assert asyncio.run(spend()) == ALLOWANCE
    assert allowance.charged() == {COARSE: ALLOWANCE}


def test_two_purses_spend_one_budget(allowance: Allowance) -> None:
    async def spend() -> int:
        first, second = Purse(allowance.actor, 50), Purse(allowance.actor, 70)
        taken = sum(await asyncio.gather(drain(first, lambda: 2), drain(second, lambda: 3)))
        assert (first.available, second.available) == (0, 0)
        return taken

    assert asyncio.run(spend()) == ALLOWANCE
    assert allowance.charged() == {COARSE: ALLOWANCE}


def test_what_one_settles_another_may_take(allowance: Allowance) -> None:
    async def spend() -> None:
        rich, poor = Purse(allowance.actor, ALLOWANCE), Purse(allowance.actor, 50)
        await rich.take(COARSE, 1)
        assert await poor.take(COARSE, 10) == 0
        await rich.settle()
        assert await poor.take(COARSE, 10) == 10

    asyncio.run(spend())


def test_being_cancelled_loses_nothing(allowance: Allowance) -> None:
    async def spend() -> int:
        purse, choice, taken = Purse(allowance.actor, 10), random.Random(0), 0
        while granted := await cancelled_sometimes(lambda: purse.take(COARSE, 4), choice):
            taken += granted
        return taken

    async def cancelled_sometimes(take: Callable[[], Awaitable[int]], choice: random.Random) -> int:
        while choice.random() < 0.5:
            waiting = asyncio.ensure_future(take())
            await asyncio.sleep(0)
            if waiting.done():
                return waiting.result()
            waiting.cancel()
            await asyncio.wait([waiting])
        return await take()

    assert asyncio.run(spend()) == ALLOWANCE


def test_the_actor_dies_and_the_purse_goes_on(allowance: Allowance) -> None:
    async def spend() -> int:
        purse = Purse(allowance.actor, 20)
        taken = await purse.take(COARSE, 15)
        ray.kill(allowance.actor, no_restart=False)
        return taken + await drain(purse, lambda: 15)

    assert asyncio.run(spend()) == ALLOWANCE
    assert allowance.charged() == {COARSE: ALLOWANCE}


def test_a_purse_that_is_lost_stays_charged(allowance: Allowance) -> None:
    async def spend() -> None:
        await Purse(allowance.actor, 100).take(COARSE, 1)

    asyncio.run(spend())
    assert allowance.charged() == {COARSE: 100}
    assert asyncio.run(drain(Purse(allowance.actor, 100), lambda: 1)) == ALLOWANCE - 100


def test_a_failure_is_told_to_whoever_needs_tokens(allowance: Allowance, roomy: PrivacyBudget) -> None:
    async def spend() -> None:
        purse = Purse(allowance.actor, 20)
        assert await purse.take(COARSE, 5) == 5
        Ledger(allowance.path, roomy)
        assert await purse.take(COARSE, 15) == 15, "these were charged before"
        for _ in range(2):
            with pytest.raises(Fenced):
                await purse.take(COARSE, 1)
        allowance.restart()
        assert await purse.take(COARSE, 1) == 1

    asyncio.run(spend())


def test_sizes_and_counts_must_make_sense(allowance: Allowance) -> None:
    with pytest.raises(ValueError, match="at least 1 token at a time, not 0"):
        Purse(allowance.actor, 0)
    with pytest.raises(ValueError, match="cannot take -1"):
        asyncio.run(Purse(allowance.actor).take(COARSE, -1))
    assert asyncio.run(Purse(allowance.actor).take(COARSE, 0)) == 0
