"""Claim: a statement never reports less than was spent, and reports nothing private to clients."""

from collections import Counter
from dataclasses import replace

import pytest

from privmix.budget.filter import Filter
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.state import Balance
from privmix.budget.statement import statement
from privmix.privacy import accounting
from privmix.privacy.accounting import composition
from privmix.privacy.protocols.ensemble import EnsembleEvent
from privmix.privacy.protocols.pmixed import PublishedEvent
from tests.services.budget.conftest import known
from tests.services.budget.events import COARSE, FINE


@pytest.fixture
def balance(terms: PrivacyBudget) -> Balance:
    return Balance(terms, Counter({COARSE: 100}), Counter({COARSE: 20}), COARSE, epoch=2, rows=9, head="ab" * 32)


def test_a_statement_of_one_event(balance: Balance, terms: PrivacyBudget) -> None:
    stated = statement(balance)
    enforced = Filter(terms).epsilon(balance.charged)
    assert enforced <= known(stated.epsilon_bound) < enforced + 1e-4
    assert known(stated.epsilon_spent) <= known(stated.epsilon_bound)
    assert stated.epsilon_left == pytest.approx(known(terms.epsilon) - known(stated.epsilon_spent))
    assert (stated.tokens_charged, stated.tokens_held, stated.tokens_left) == (100, 20, 208 - 100)
    assert [(charge.event["radius"], charge.tokens, charge.status) for charge in stated.charges] == [
        (0.4, 100, "certified")
    ]
    assert (stated.epoch, stated.rows, stated.head) == (2, 9, "ab" * 32)


def test_a_few_tokens_cost_little_and_all_of_them_the_budget(balance: Balance, terms: PrivacyBudget) -> None:
    """At the order that is best for the whole budget, ten tokens of 208 would seem to cost a quarter of it."""
    planned = terms.model_copy(update={"order": accounting.epsilon(accounting.rdp({COARSE: 208}), terms.delta).order})
    few, most = (statement(replace(balance, terms=planned, charged=Counter({COARSE: n}))) for n in (10, 208))
    assert known(few.epsilon_spent) < 0.7 * known(few.epsilon_bound)
    assert known(few.epsilon_left) == pytest.approx(8 - known(few.epsilon_spent))
    assert known(most.epsilon_spent) == known(most.epsilon_bound)


def test_a_statement_composes_no_loss_distribution(balance: Balance, monkeypatch: pytest.MonkeyPatch) -> None:
    def compose(*arguments: object) -> None:
        raise AssertionError("a client could keep the budget actor busy")

    monkeypatch.setattr(composition, "pld", compose)
    statement(balance)
    statement(replace(balance, charged=Counter({COARSE: 47, FINE: 53}), latest=FINE), COARSE)


def test_the_spent_epsilon_of_measured_losses_is_called_an_estimate(balance: Balance) -> None:
    for_clients = statement(balance).client()
    assert "estimates, and no guarantee at a moment that is chosen after looking at answers" in for_clients.note
    assert for_clients.epsilon is not None, "clients see the promised epsilon"
    assert not for_clients.exhausted
    gone = replace(balance, charged=Counter({COARSE: Filter(balance.terms).affordable({}, COARSE)}))
    assert statement(gone).client().exhausted


@pytest.mark.parametrize("changes", [{"enforced": "measured"}, {"epsilon": None}])
def test_a_note_promises_no_epsilon_where_none_is_promised(balance: Balance, changes: dict[str, object]) -> None:
    """The note of a budget with a limit would say "The guarantee is epsilon and delta" beside an epsilon of None."""
    for_clients = statement(replace(balance, terms=balance.terms.model_copy(update=changes))).client()
    assert for_clients.epsilon is None
    assert for_clients.note.startswith("No epsilon is promised")
    assert "The guarantee is epsilon" not in for_clients.note


def test_the_statement_of_two_events_matches_the_filter(balance: Balance) -> None:
    stated = statement(replace(balance, charged=Counter({COARSE: 50, FINE: 50}), latest=FINE))
    both = accounting.rdp({COARSE: 50, FINE: 50})
    assert stated.epsilon_spent == pytest.approx(accounting.epsilon(both, 1e-5).epsilon, abs=1e-4)
    assert stated.tokens_charged == 100
    assert {charge.event["radius"]: charge.tokens for charge in stated.charges} == {0.4: 50, 0.2: 50}


def test_a_statement_before_any_spending(balance: Balance, terms: PrivacyBudget) -> None:
    fresh = replace(balance, charged=Counter(), held=Counter(), latest=None)
    stated = statement(fresh)
    assert (stated.epsilon_spent, stated.epsilon_left) == (0, terms.epsilon)
    assert (stated.tokens_charged, stated.tokens_left, stated.charges) == (0, None, ())
    assert statement(fresh, COARSE).tokens_left == 208


def test_the_weakest_guarantee_decides(balance: Balance) -> None:
    published = PublishedEvent(8, 0.25, order=9, loss=0.01)
    stated = statement(replace(balance, charged=Counter({COARSE: 5, published: 5})))
    assert "as published" in stated.guarantee
    assert "certified" not in stated.guarantee


def test_a_budget_without_a_promise_has_no_limit(balance: Balance, terms: PrivacyBudget) -> None:
    unlimited = terms.model_copy(update={"epsilon": None})
    stated = statement(replace(balance, terms=unlimited, charged=Counter({EnsembleEvent(): 5}), latest=EnsembleEvent()))
    assert (stated.epsilon, stated.epsilon_spent, stated.epsilon_left, stated.tokens_left) == (None,) * 4
    assert stated.guarantee.startswith("No privacy guarantee")
