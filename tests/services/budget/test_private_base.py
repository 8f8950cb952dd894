"""Claim: a ledger charges its private base once, from its creation on, and the sum is that of the two events alone."""

from pathlib import Path

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant, compute_epsilon

from privmix.budget.filter import Filter, counted
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.budget.statement import statement
from privmix.foundation.errors import LedgerMismatch
from privmix.privacy import accounting
from privmix.privacy.events import PLD_INTERVAL, Accountant
from privmix.privacy.protocols.dp_sgd import DpSgdEvent, noise_multiplier
from privmix.privacy.protocols.exponential import ExponentialSettings
from privmix.privacy.protocols.pmixed import PMixedSettings
from privmix.privacy.settings import Settings

DELTA = 1e-5
TOKENS = 1024
STEPS = 20
BASE = DpSgdEvent("user", noise_multiplier(4.0, DELTA, 1.0, STEPS), 1.0, STEPS, "base")
OTHER = DpSgdEvent("user", noise_multiplier(4.0, DELTA, 1.0, STEPS), 1.0, STEPS, "another")
SETTINGS = ExponentialSettings(epsilon=8.0, delta=DELTA, tokens=TOKENS)


def terms(base: DpSgdEvent | None = BASE, *, settings: Settings = SETTINGS) -> PrivacyBudget:
    settings = settings.on_base(base)
    return PrivacyBudget.of("e", settings, settings.plan(64), base=base)


@pytest.mark.parametrize("settings", [SETTINGS, PMixedSettings(epsilon=2.0, delta=DELTA, tokens=TOKENS, q=0.5)])
def test_the_sum_is_that_of_dp_accounting(settings: Settings) -> None:
    """The reference knows the two events alone, and composes the steps of the base one by one."""
    base = DpSgdEvent("user", noise_multiplier(1.0, DELTA, 1.0, STEPS), 1.0, STEPS, "base")
    on_base = settings.on_base(base)
    planned = on_base.plan(64, Accountant(8.0))  # by the filter alone
    event, budget = planned.event, PrivacyBudget.of("e", on_base, planned, base=base)
    accountant = RdpAccountant([budget.order])
    accountant.compose(GaussianDpEvent(base.noise_multiplier), STEPS)
    total = np.asarray(accountant.rdp) + TOKENS * event.rdp([budget.order])
    expected, _ = compute_epsilon([budget.order], total, DELTA)
    assert Filter(budget).epsilon({event: TOKENS}) == pytest.approx(expected, abs=1e-6)
    assert settings.epsilon is not None
    assert settings.epsilon - 1e-3 < expected <= settings.epsilon


def test_a_counter_states_what_dp_accounting_composes() -> None:
    """A counter states the cost of a few tokens more than it granted, at a little less of delta."""
    settings = PMixedSettings(epsilon=8.0, delta=DELTA, tokens=TOKENS).on_base(BASE)
    planned = settings.plan(64)
    budget = counted(PrivacyBudget.of("e", settings, planned, base=BASE), planned.event, settings.planned)
    assert budget.counter is not None
    accountant = PLDAccountant(value_discretization_interval=PLD_INTERVAL)
    accountant.compose(GaussianDpEvent(BASE.noise_multiplier), STEPS)
    for tokens in (10, 500, TOKENS):
        both = accountant._pld.compose(accounting.pld({planned.event: tokens}))
        due, stated = both.get_epsilon_for_delta(DELTA), Filter(budget).epsilon({planned.event: tokens})
        assert due - 1e-6 <= stated <= 1.04 * due


def test_the_budget_lasts_for_the_tokens_with_less_radius() -> None:
    alone, on_base = SETTINGS.plan(64), SETTINGS.on_base(BASE).plan(64)
    assert 0.8 * alone.radius < on_base.radius < 0.9 * alone.radius
    assert Filter(terms()).affordable({}, on_base.event) == pytest.approx(TOKENS, abs=1)
    assert Filter(terms()).affordable({}, alone.event) < 0.8 * TOKENS
    with pytest.raises(ValueError, match="does not last for 1024 tokens besides the private base"):
        SETTINGS.model_copy(update={"epsilon": 4.0}).on_base(BASE).plan(64)


def test_a_ledger_charges_the_base_once_from_its_creation_on(tmp_path: Path) -> None:
    event = SETTINGS.on_base(BASE).plan(64).event
    for restart in range(3):
        ledger = Ledger.create(tmp_path / "ledger.db", terms())
        stated = statement(ledger.balance(), event)
        if restart == 0:
            assert stated.epsilon_spent == pytest.approx(4.0, abs=1e-3)
        assert stated.epsilon_base == pytest.approx(4.0, abs=1e-3)
        assert stated.base is not None
        assert stated.base["run"] == "base"
        ledger.settle(ledger.lease(event, 5).lease, 5)
    balance = read(tmp_path / "ledger.db")
    both = accounting.epsilon(accounting.rdp({event: 15, BASE: 1}), DELTA).epsilon
    assert balance.charged == {event: 15}
    stated = statement(balance)
    assert stated.epsilon_bound == pytest.approx(Filter(terms()).epsilon({event: 15}), abs=1e-4)
    assert stated.epsilon_spent == pytest.approx(both, abs=1e-4)
    sentence = statement(balance).guarantee
    assert "(8, 1e-05)-differential privacy for any one user's text" in sentence
    assert "The base's training, epsilon 3.9999 alone, is part of it and is charged once." in sentence


@pytest.mark.parametrize("forged", [terms(None), terms(OTHER)])
def test_a_ledger_refuses_a_service_that_counts_another_base(forged: PrivacyBudget, tmp_path: Path) -> None:
    """The planted faults: the base is not charged; another base takes its place."""
    Ledger.create(tmp_path / "ledger.db", terms())
    with pytest.raises(LedgerMismatch, match="base"):
        Ledger.create(tmp_path / "ledger.db", forged.model_copy(update={"order": terms().order}))


def test_a_base_of_records_is_no_base_for_users() -> None:
    with pytest.raises(ValueError, match="base: its guarantee is for other neighbouring corpora"):
        terms(DpSgdEvent("record", 3.0, 1.0, STEPS, "records"))
