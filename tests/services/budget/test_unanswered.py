"""Claim: a lease whose commit reaches the disk without a confirmation is used or returned, and never lost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import Connection

from privmix.budget import client as budget_client
from privmix.budget.client import BudgetClient
from privmix.budget.ledger import Grant, Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.foundation.errors import LedgerUnavailable
from privmix.privacy.events import Event
from privmix.privacy.protocols.individual import IndividualSettings
from tests.services.budget.events import COARSE, FINE

pytestmark = pytest.mark.anyio

SIZE = 20
PARTS = 3
INDIVIDUAL = IndividualSettings(tokens=2048)
ACCOUNTED = INDIVIDUAL.plan(PARTS)


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
        self.start()

    def start(self) -> None:
        """Opens the ledger as a restarted actor does."""
        self.ledger = Ledger.create(self.path, self.terms)
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
        return self.ledger.lease(EVENTS[event], wanted, name, parts)

    def _settle(self, name: str, used: int, charges: tuple[int, ...]) -> None:
        if self.away == "unsettled":
            raise LedgerUnavailable("the server does not answer")
        self.ledger.settle(name, used, charges)

    def on_disk(self) -> tuple[int, int]:
        """Returns how many tokens are charged on disk, and how many of them open leases hold."""
        balance = Ledger.create(self.path, self.terms).balance()
        self.start()  # the writer above has begun an epoch
        return sum(balance.charged.values()), sum(balance.held.values())


EVENTS: dict[str, Event] = {event.to_json(): event for event in (COARSE, FINE, ACCOUNTED.event)}


@pytest.fixture
async def budget(path: Path, roomy: PrivacyBudget, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Budget]:
    monkeypatch.setattr(budget_client, "SETTLE_S", 0.05)
    monkeypatch.setattr(budget_client, "RETRY_S", 0.01)
    yield Budget(path, roomy)


async def take(client: BudgetClient, event: Event, count: int) -> int:
    async with client.reserve(event, count) as reserved:
        reserved.mark_released(reserved.count)
    return reserved.count


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
