"""Claim: the client charges every token on disk before its release, and no outage loses a token of the budget."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import Connection

from privmix.budget import client as budget_client
from privmix.budget.client import STEPS_AHEAD, BudgetClient
from privmix.budget.ledger import Grant, Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.foundation.errors import Fenced, LedgerUnavailable
from privmix.privacy.events import Event, from_json
from privmix.privacy.protocols.individual import WHOLE, IndividualSettings
from privmix.privacy.protocols.submix import SubMixEvent
from tests.services.budget.events import COARSE, FINE

pytestmark = pytest.mark.anyio

ALLOWANCE = 208
"""The tokens of COARSE that the budget covers."""
SIZE = 20
PARTS = 3
INDIVIDUAL = IndividualSettings(tokens=2048)
ACCOUNTED = INDIVIDUAL.plan(PARTS)
SUBMIX = SubMixEvent(parts=PARTS, order=8.0, beta=0.01)


class Call:
    """Calls a method of a ledger as a handle of the budget actor does."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    async def remote(self, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return self._method(*arguments)


class Budget:
    """Stands for the handle of the budget actor, with a ledger whose commits may fail.

    Attributes:
        away: whether commits reach the disk and are not confirmed, or are not made at all, or only settlements are not;
            None if they succeed.
        asked: the names of the requested leases.
    """

    def __init__(self, path: Path, terms: PrivacyBudget) -> None:
        self.away: Literal["unconfirmed", "undone", "unsettled"] | None = None
        self.asked: list[str] = []
        self.path, self.terms = path, terms
        self.settle = Call(self._settle)
        self.lease = Call(self._lease)
        self.charge = Call(lambda event, tokens, name: self.ledger.charge(from_json(event), tokens, name))
        self.stopped = Call(lambda: self.ledger.balance().stopped)
        self.start()

    def start(self) -> None:
        """Opens the ledger as a restarted actor does."""
        self.ledger = Ledger.create(self.path, self.terms, holder="service")
        self._transaction = self.ledger._database.transaction
        self.ledger._database.transaction = self._failing  # type: ignore[method-assign]

    @contextmanager
    def _failing(self) -> Iterator[Connection]:
        with self._transaction() as connection:
            yield connection
            if self.away == "undone":
                raise LedgerUnavailable("the disk is full")
        if self.away:
            raise LedgerUnavailable("the synchronous standby does not answer")

    def _lease(self, event: str, wanted: int, name: str, parts: int | None) -> Grant:
        self.asked.append(name)
        return self.ledger.lease(from_json(event), wanted, name, parts)

    def _settle(self, name: str, used: int, charges: tuple[int, ...]) -> None:
        if self.away == "unsettled":
            raise LedgerUnavailable("the server does not answer")
        self.ledger.settle(name, used, charges)

    def charged(self) -> dict[Event, int]:
        """Returns the charges on disk."""
        return dict(read(self.path).charged)

    def on_disk(self) -> tuple[int, int]:
        """Returns how many tokens are charged on disk, and how many of them open leases hold."""
        balance = read(self.path)
        return sum(balance.charged.values()), sum(balance.held.values())


@pytest.fixture
def budget(path: Path, terms: PrivacyBudget, monkeypatch: pytest.MonkeyPatch) -> Budget:
    monkeypatch.setattr(budget_client, "SETTLE_S", 0.05)
    monkeypatch.setattr(budget_client, "RETRY_S", 0.01)
    return Budget(path, terms)


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
async def test_the_client_spends_the_whole_budget(budget: Budget, size: int) -> None:
    client, taken = BudgetClient(budget, size), 0
    while granted := await take(client, COARSE, random.randint(1, 40)):
        taken += granted
        assert budget.charged()[COARSE] >= taken, "on disk before their release"
    await tasks_end()
    assert taken == ALLOWANCE
    assert budget.charged() == {COARSE: ALLOWANCE}


async def test_a_new_event_returns_the_leases_of_the_previous_event(budget: Budget) -> None:
    client = BudgetClient(budget, 20)
    await take(client, COARSE, 15)
    assert await take(client, FINE, 5) == 5
    assert budget.charged() == {COARSE: 15, FINE: 20}
    await client.settle()
    await tasks_end()
    assert budget.charged() == {COARSE: 15, FINE: 5}


async def test_two_clients_spend_one_budget(budget: Budget) -> None:
    first, second = BudgetClient(budget, 50), BudgetClient(budget, 70)
    taken = sum(await asyncio.gather(drain(first, lambda: 2), drain(second, lambda: 3)))
    assert (first.available, second.available) == (0, 0)
    await tasks_end()
    assert taken == ALLOWANCE
    assert budget.charged() == {COARSE: ALLOWANCE}


async def test_cancellation_loses_no_tokens(budget: Budget) -> None:
    async def cancelled_sometimes(take: Callable[[], Awaitable[int]], choice: random.Random) -> int:
        while choice.random() < 0.5:
            waiting = asyncio.ensure_future(take())
            await asyncio.sleep(0)
            if waiting.done():
                return waiting.result()
            waiting.cancel()
            await asyncio.wait([waiting])
        return await take()

    client, choice, taken = BudgetClient(budget, 10), random.Random(0), 0
    while granted := await cancelled_sometimes(lambda: take(client, COARSE, 4), choice):
        taken += granted
    assert taken == ALLOWANCE


async def test_a_lease_is_settled_when_a_lost_database_is_back(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settlement was given up, so each outage left up to three leases of each coordinator charged."""
    monkeypatch.setattr(budget_client, "SETTLE_S", 60.0)
    client = BudgetClient(budget, 100)
    assert await take(client, COARSE, 7) == 7
    away = budget.path.rename(budget.path.with_suffix(".away"))
    settling = asyncio.create_task(client.settle())
    await asyncio.sleep(0.2)
    assert not settling.done()
    away.rename(budget.path)
    await settling
    await tasks_end()
    assert budget.charged() == {COARSE: 7}


async def test_a_failed_ledger_raises_in_every_reservation(budget: Budget) -> None:
    client = BudgetClient(budget, 20)
    assert await take(client, COARSE, 5) == 5
    successor = Ledger.create(budget.path, budget.terms)
    assert await take(client, COARSE, 15) == 15, "these tokens were charged before"
    for _ in range(2):
        with pytest.raises(Fenced):
            await take(client, COARSE, 1)
    successor.give_up()
    assert await take(client, COARSE, 1) == 1


async def test_unreleased_tokens_are_returned(budget: Budget) -> None:
    """A failed step releases nothing, so its tokens can be reserved again at no cost."""
    client = BudgetClient(budget, 20)
    for _ in range(50):
        with pytest.raises(ZeroDivisionError):
            async with client.reserve(COARSE, 15):
                raise ZeroDivisionError
    async with client.reserve(COARSE, 40) as reserved:  # from two leases
        reserved.mark_released(4)
        with pytest.raises(ValueError, match="cannot release 37 more tokens of 40 with 4 released"):
            reserved.mark_released(37)
    await client.settle()
    await tasks_end()
    assert budget.charged() == {COARSE: 4}


async def test_leases_grow_with_the_steps_up_to_the_need(budget: Budget) -> None:
    client = BudgetClient(budget, 4)
    async with client.reserve(COARSE, 30):
        assert budget.charged()[COARSE] >= STEPS_AHEAD * 30, "the next step finds its tokens charged"
    await client.settle()
    async with client.reserve(COARSE, 3, upcoming=3):
        assert budget.charged() == {COARSE: 3}, "the client leases only tokens that a sequence can still use"
    await client.settle()
    await tasks_end()
    assert budget.charged() == {}


async def test_unused_leases_are_recalled_before_a_refusal(budget: Budget) -> None:
    first = BudgetClient(budget, ALLOWANCE)
    second = BudgetClient(budget, 50, recall=first.return_unused)
    assert await take(first, COARSE, ALLOWANCE - 30) == ALLOWANCE - 30
    assert first.available == 30
    assert await take(second, COARSE, 20) == 20, "20 of the 30 unused tokens of the first client"
    await second.settle()
    assert await take(first, COARSE, 11) == 10
    await tasks_end()
    assert budget.charged() == {COARSE: ALLOWANCE}


async def test_a_recall_waits_for_reserved_tokens_and_returns_the_unused_ones(budget: Budget) -> None:
    first = BudgetClient(budget, ALLOWANCE)
    second = BudgetClient(budget, 1, recall=first.return_unused)
    async with first.reserve(COARSE, ALLOWANCE) as reserved:
        waiting = asyncio.create_task(take(second, COARSE, 5))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        reserved.mark_released(ALLOWANCE - 5)
    assert await waiting == 5
    await tasks_end()
    assert budget.charged() == {COARSE: ALLOWANCE}


async def test_invalid_sizes_and_counts_are_refused(budget: Budget) -> None:
    with pytest.raises(ValueError, match="at least 1 token, not 0"):
        BudgetClient(budget, 0)
    with pytest.raises(ValueError, match="cannot reserve -1"):
        await take(BudgetClient(budget), COARSE, -1)
    assert await take(BudgetClient(budget), COARSE, 0) == 0


async def test_measured_tokens_are_charged_before_their_release(path: Path, terms: PrivacyBudget) -> None:
    budget = Budget(path, terms.model_copy(update={"enforced": "measured"}))
    client = BudgetClient(budget)
    async with client.reserve(SUBMIX, 3) as reserved:
        assert reserved.count == 3
        assert await reserved.charge([[0.1, 0.2, 0.3]] * 3) == 3
    async with client.reserve(SUBMIX, 2) as reserved:
        assert await reserved.charge([[0.1, 0.2, 0.3], [1e9, 0.0, 0.0]]) == 1
    for closed in (client, BudgetClient(budget)):
        async with closed.reserve(SUBMIX, 1) as reserved:
            assert reserved.count == 0, "a limit on losses ends for ever"
    assert budget.charged() == {SUBMIX: 4}


async def test_each_token_is_charged_to_the_lease_that_allowed_it(path: Path) -> None:
    budget = Budget(path, PrivacyBudget.of("clinic", INDIVIDUAL, ACCOUNTED, partition="salt"))
    client, expected = BudgetClient(budget, 4), list[tuple[int, int]]()
    for step in range(12):
        async with client.reserve(ACCOUNTED.event, 3, parts=PARTS) as reserved:
            assert reserved.count == 3
            released = {token: (step, token, 0) for token in range(3) if (token + step) % 3}
            reserved.mark_charged(released)
            expected += [(step, token) for token in released]
    async with client.reserve(ACCOUNTED.event, 1, parts=PARTS) as reserved:
        with pytest.raises(ValueError, match="exceed its allowances"):
            reserved.mark_charged({0: (WHOLE, 0, 0)})
        with pytest.raises(ValueError, match="cannot be released"):
            reserved.mark_charged({1: (0, 0, 0)})
    await client.settle()
    await tasks_end()
    assert budget.charged() == {ACCOUNTED.event: len(expected)}
    accounts = read(path).accounts
    assert accounts.charged == (sum(step for step, _ in expected), sum(token for _, token in expected), 0)
    assert not any(accounts.held)


async def fails(work: Callable[[], Awaitable[object]], times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(LedgerUnavailable):
            await work()


async def unanswered(budget: Budget, away: Literal["unconfirmed", "undone"] = "unconfirmed") -> BudgetClient:
    """Returns a client whose request for a lease failed like this. The database is still away."""
    client = BudgetClient(budget, SIZE)
    budget.away = away
    await fails(lambda: take(client, COARSE, 7))
    return client


async def test_a_repeated_step_gets_the_lease_that_was_not_confirmed(budget: Budget) -> None:
    """Each repetition charged a lease of its own, whose name nobody knew: 20 tokens for every one of them."""
    client = BudgetClient(budget, SIZE)
    budget.away = "unconfirmed"
    await fails(lambda: take(client, COARSE, 7), times=5)
    assert len(set(budget.asked)) == 1
    assert budget.on_disk() == (SIZE, SIZE)
    budget.away = None
    assert await take(client, COARSE, 7) == 7
    await client.settle()
    assert budget.on_disk() == (7, 0)


@pytest.mark.parametrize("away", ["unconfirmed", "undone"])
async def test_a_settlement_returns_a_lease_that_may_be_granted(
    budget: Budget, away: Literal["unconfirmed", "undone"], caplog: pytest.LogCaptureFixture
) -> None:
    client = await unanswered(budget, away)
    budget.away = None
    await client.settle()
    assert budget.on_disk() == (0, 0)
    assert not caplog.records
    assert await take(client, COARSE, 7) == 7
    await client.settle()
    assert budget.on_disk() == (7, 0)


async def test_a_lease_requested_ahead_is_returned_too(budget: Budget) -> None:
    client = BudgetClient(budget, SIZE)
    assert await take(client, COARSE, 1) == 1
    budget.away = "unconfirmed"
    assert await take(client, COARSE, 12) == 12, "these tokens were charged before"
    while len(budget.asked) < 2 or client._arriving:
        await asyncio.sleep(0)
    budget.away = None
    await client.settle()
    assert budget.on_disk() == (13, 0)


async def test_a_lease_is_returned_after_settlements_that_were_given_up(budget: Budget) -> None:
    client = BudgetClient(budget, SIZE)
    budget.away = "unsettled"
    for event in (COARSE, FINE, COARSE, FINE):
        await fails(partial(take, client, event, 7))
        async with asyncio.timeout(10):
            await client.settle()
    assert budget.on_disk() == (2 * SIZE, 2 * SIZE), "one lease of each event, however many answers began and ended"
    budget.away = None
    await client.settle()
    assert budget.on_disk() == (0, 0)


async def test_a_lease_is_settled_after_its_last_reservation_and_not_after_an_earlier_one(budget: Budget) -> None:
    client = BudgetClient(budget, SIZE)
    assert await take(client, COARSE, 7) == 7
    async with client.reserve(COARSE, 5) as reserved:
        settling = asyncio.create_task(client.settle())
        for _ in range(20):
            await asyncio.sleep(0)
        assert budget.on_disk() == (SIZE, SIZE), "five tokens are about to be sampled"
        reserved.mark_released(5)
    await settling
    assert budget.on_disk() == (12, 0)


async def test_a_lease_whose_settlement_was_not_confirmed_is_not_used_again(budget: Budget) -> None:
    client = await unanswered(budget)
    await client.settle()
    budget.away = None
    assert await take(client, COARSE, 7) == 7
    assert len(set(budget.asked)) == 2
    assert budget.on_disk() == (SIZE, SIZE), "released tokens are charged in an open lease"
    await client.settle()
    assert budget.on_disk() == (7, 0)


async def test_a_lease_outlives_the_actor_that_granted_it(budget: Budget) -> None:
    client = await unanswered(budget)
    budget.away = None
    budget.start()
    assert await take(client, COARSE, 7) == 7
    assert len(set(budget.asked)) == 1
    budget.away = "unconfirmed"
    await fails(lambda: take(client, COARSE, SIZE))
    budget.away = None
    budget.start()
    await client.settle()
    assert budget.on_disk() == (7, 0)


async def test_a_lease_that_is_being_requested_is_not_returned(budget: Budget) -> None:
    """Another client's recall would give back tokens that this client then releases."""
    client = await unanswered(budget)
    budget.away = None
    async with client.reserve(COARSE, 0):  # begins the request ahead
        assert client._arriving
        await asyncio.sleep(0)
        await client.return_unused()
    assert await take(client, COARSE, 7) == 7
    assert budget.on_disk()[0] >= 7
    await client.settle()
    assert budget.on_disk() == (7, 0)


async def test_a_cancelled_step_loses_no_lease(budget: Budget) -> None:
    client = BudgetClient(budget, SIZE)
    budget.away = "unconfirmed"
    step = asyncio.create_task(take(client, COARSE, 7))
    while not client._arriving:
        await asyncio.sleep(0)
    step.cancel()
    await asyncio.wait([step])
    assert step.cancelled()
    while client._arriving:
        await asyncio.sleep(0)
    assert budget.asked
    budget.away = None
    await client.settle()
    assert budget.on_disk() == (0, 0)


async def test_a_lease_of_accounts_is_returned(path: Path, budget: Budget) -> None:
    terms = PrivacyBudget.of("clinic", INDIVIDUAL, ACCOUNTED, partition="salt")
    accounted = Budget(path.with_name("accounts.db"), terms)
    client = BudgetClient(accounted, 4)
    accounted.away = "unconfirmed"
    for _ in range(3):
        with pytest.raises(LedgerUnavailable):
            async with client.reserve(ACCOUNTED.event, 3, parts=PARTS):
                pass
    accounted.away = None
    await client.settle()
    assert accounted.on_disk() == (0, 0)
    assert not any(accounted.ledger.balance().accounts.held)
    accounted.away = "unconfirmed"
    with pytest.raises(LedgerUnavailable):
        async with client.reserve(ACCOUNTED.event, 3, parts=PARTS):
            pass
    accounted.away = None
    async with client.reserve(ACCOUNTED.event, 1, parts=PARTS) as reserved:
        reserved.mark_charged({0: (1, 2, 3)})
    async with client.reserve(ACCOUNTED.event, 1, parts=PARTS - 1) as reserved:
        reserved.mark_charged({0: (1, 0)})
    await client.settle()
    assert accounted.on_disk() == (2, 0)
    balance = accounted.ledger.balance()
    assert (balance.accounts.charged, any(balance.accounts.held)) == ((2, 2, 3), False)
