"""Claim: in any interleaving of leases, settlements and crashes, released <= charged <= budget."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.foundation.errors import Fenced, LeaseRefused
from privmix.privacy.events import Event
from tests.postgresql import Server
from tests.services.budget.events import EVENTS
from tests.support.epsilons import exact_epsilon


@dataclass
class Holding:
    """A coordinator's side of a lease."""

    lease: str
    event: Event
    count: int
    released: int = 0


class LedgerStates(RuleBasedStateMachine):
    holdings: Bundle[Holding] = Bundle("holdings")
    settled: Bundle[Holding] = Bundle("settled")

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.released: Counter[Event] = Counter()
        self.open: dict[str, Holding] = {}
        self.replaced: list[Ledger] = []

    @initialize(epsilon=st.sampled_from([2.0, 3.0, 8.0]))
    def begin(self, epsilon: float) -> None:
        self.terms = PrivacyBudget(ensemble="e", epsilon=epsilon, delta=1e-5, order=8.0, adjacency="parts")
        self.ledger = Ledger.create(self.place, self.terms)

    @rule(target=holdings, event=st.sampled_from(EVENTS), wanted=st.integers(1, 200))
    def lease(self, event: Event, wanted: int) -> Holding:
        grant = self.ledger.lease(event, wanted)
        assert 0 <= grant.count <= wanted
        holding = Holding(grant.lease, event, grant.count)
        if grant.count:
            self.open[grant.lease] = holding
        return holding

    @rule(holding=holdings, data=st.data())
    def release(self, holding: Holding, data: st.DataObject) -> None:
        tokens = data.draw(st.integers(0, holding.count - holding.released))
        holding.released += tokens
        self.released[holding.event] += tokens

    @rule(target=settled, holding=consumes(holdings).filter(lambda holding: holding.count))
    def settle(self, holding: Holding) -> Holding:
        self.ledger.settle(holding.lease, holding.released)
        del self.open[holding.lease]
        return holding

    @rule(holding=settled, change=st.integers(-2, 2))
    def settle_again(self, holding: Holding, change: int) -> None:
        before = self.ledger.balance()
        if change == 0:
            self.ledger.settle(holding.lease, holding.released)
        else:
            with pytest.raises(LeaseRefused):
                self.ledger.settle(holding.lease, holding.released + change)
        assert self.ledger.balance() == before

    @rule(holding=consumes(holdings))
    def coordinator_dies(self, holding: Holding) -> None:
        """Forgets the lease without a settlement, so that its tokens stay charged."""

    @rule()
    def writer_dies(self) -> None:
        before, self.replaced = self.ledger.balance(), [*self.replaced, self.ledger]
        self.ledger = Ledger.create(self.place, self.terms)
        after = self.ledger.balance()
        assert (after.charged, after.held, after.epoch) == (before.charged, before.held, before.epoch + 1)

    @rule(event=st.sampled_from(EVENTS))
    def replaced_writer_tries(self, event: Event) -> None:
        for ledger in self.replaced:
            with pytest.raises(Fenced):
                ledger.lease(event, 1)

    @invariant()
    def budget_covers_charged_covers_released(self) -> None:
        balance = read(self.place)
        held = Counter[Event]()
        for holding in self.open.values():
            held[holding.event] += holding.count
        assert balance.held == +held
        assert all(balance.charged.get(event, 0) >= tokens for event, tokens in self.released.items())
        assert exact_epsilon(self.terms, balance.charged) <= self.terms.epsilon


def test_in_sqlite(tmp_path: Path) -> None:
    numbers = count()
    check(lambda: str(tmp_path / f"{next(numbers)}.db"), examples=20)


def test_in_postgresql(postgresql: Server) -> None:
    check(postgresql.database, examples=5)


def check(new_place: Callable[[], str], examples: int) -> None:
    few = settings(max_examples=examples, stateful_step_count=20)
    run_state_machine_as_test(lambda: LedgerStates(new_place()), settings=few)  # type: ignore[arg-type]
