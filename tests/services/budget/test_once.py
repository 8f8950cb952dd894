"""Claim: the first token of a private training is charged the whole training, and its other tokens are free."""

from pathlib import Path

import pytest

from privmix.budget.filter import UNLIMITED, Filter
from privmix.budget.ledger import FREE_LEASE, Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.budget.statement import statement
from privmix.privacy.events import Event
from privmix.privacy.protocols.dp_sgd import DpSgdEvent
from privmix.privacy.protocols.pmixed import RatioEvent
from privmix.privacy.protocols.public import PublicEvent
from tests.services.budget.conftest import known

DELTA = 1e-5
FIRST, SECOND = (DpSgdEvent("user", 1.1, 0.05, 100, run) for run in ("first", "second"))
COST = FIRST.epsilon(DELTA)


def terms(epsilon: float) -> PrivacyBudget:
    return PrivacyBudget(ensemble="e", epsilon=epsilon, delta=DELTA, order=4.0, adjacency="user, add or remove")


@pytest.mark.parametrize("spent", [{}, {FIRST: 1}, {FIRST: 10**6}, {PublicEvent(): 5}])
def test_a_budget_of_the_training_cost_covers_any_number_of_tokens(spent: dict[Event, int]) -> None:
    assert Filter(terms(COST + 1e-9)).affordable(spent, FIRST) == UNLIMITED
    assert Filter(terms(COST - 1e-9)).affordable(spent, FIRST) == 0


@pytest.mark.parametrize("other", [SECOND, RatioEvent(parts=8, q=0.1, radius=0.1)])
def test_the_cost_of_a_training_composes_with_other_costs(other: Event) -> None:
    """The tighter conversion holds for one release alone; two releases compose at one order."""
    budget = Filter(terms(1e6))
    alone, together = budget.epsilon({FIRST: 9}), budget.epsilon({FIRST: 9, other: 1})
    assert together > alone
    assert Filter(terms(COST + 1e-9)).affordable({FIRST: 9}, other) == 0
    exact = FIRST.rdp([4.0])[0] + other.rdp([4.0])[0]
    assert together > exact


def test_the_ledger_charges_the_training_with_the_first_token(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.db", terms(COST + 0.01))
    assert statement(ledger.balance(), FIRST).epsilon_spent == 0
    for tokens in (1, 1000):
        assert ledger.lease(FIRST, tokens).count >= tokens
        stated = statement(read(tmp_path / "ledger.db"))
        assert stated.epsilon_spent == pytest.approx(COST, abs=1e-3)
        assert known(stated.epsilon_spent) <= known(stated.epsilon)
        assert stated.tokens_left is None
        assert "any number of released tokens" in stated.guarantee
    assert stated.tokens_charged == 1 + FREE_LEASE, "free tokens are leased in large numbers"
    assert ledger.lease(SECOND, 5).count == 0, "another training on the same text has its own cost"


def test_a_training_without_released_tokens_costs_nothing(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.db", terms(COST + 0.01))
    ledger.settle(ledger.lease(FIRST, 10).lease, 0)
    assert statement(ledger.balance()).epsilon_spent == 0
    assert ledger.lease(SECOND, 10).count == 10
