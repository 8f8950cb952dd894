"""Claim: costs, their composition and conversion agree with an independent implementation."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting.rdp import compute_epsilon

from privmix.privacy import accounting
from privmix.privacy.accounting.published import largest_beta, total_loss
from privmix.privacy.events import Event
from privmix.privacy.protocols.pmixed import PublishedEvent, RatioEvent

REFERENCE = json.loads(Path(__file__).with_name("reference.json").read_text())


@pytest.mark.parametrize("entry", REFERENCE["published_beta"])
def test_published_betas_are_those_of_an_independent_computation(entry: dict[str, Any]) -> None:
    loss = total_loss(entry["alpha"], entry["epsilon"], entry["delta"]) / entry["tokens"]
    assert largest_beta(entry["alpha"], entry["q"], entry["drawn"], loss) == pytest.approx(entry["beta"], rel=1e-9)


def test_different_events_compose_by_adding() -> None:
    first, second = RatioEvent(8, 0.25, 0.4), RatioEvent(9, 0.25, 0.4)
    spent: dict[Event, int] = {first: 30, second: 20}
    orders = [1.5, 4.0]
    assert accounting.rdp(spent, orders) == pytest.approx(30 * first.rdp(orders) + 20 * second.rdp(orders))
    alike = accounting.pld_epsilon({first: 50}, 1e-5)
    mixed = accounting.pld_epsilon(spent, 1e-5)
    assert alike is not None and mixed is not None
    assert mixed == pytest.approx(alike, rel=0.05)
    assert mixed < alike, "an event with more parts costs less"


def test_pure_differential_privacy_is_recovered() -> None:
    """With one part and q = 1, a token's loss is at most twice the radius, the epsilon at a tiny delta."""
    event = RatioEvent(1, 1.0, 0.3)
    assert accounting.pld_epsilon({event: 1}, 1e-12) == pytest.approx(0.6, abs=1e-3)
    assert event.rdp([1e4])[0] == pytest.approx(0.6, abs=1e-3)
    assert event.rdp([1e4])[0] <= 0.6


def test_epsilon_is_the_best_over_the_orders() -> None:
    event = RatioEvent(8, 0.25, 0.4)
    divergences = accounting.rdp({event: 100})
    best = accounting.epsilon(divergences, 1e-5)
    epsilons = [compute_epsilon([a], [d], 1e-5)[0] for a, d in zip(accounting.ORDERS, divergences, strict=True)]
    assert best.epsilon == min(epsilons)
    assert best.order == accounting.ORDERS[int(np.argmin(epsilons))]
    only = accounting.epsilon(accounting.rdp({event: 100}, [4.0]), 1e-5, [4.0])
    assert only.order == 4.0
    assert only.epsilon > best.epsilon


def test_an_empty_ledger_costs_nothing() -> None:
    event = RatioEvent(8, 0.25, 0.4)
    for spent in ({}, {event: 0}):
        assert accounting.epsilon(accounting.rdp(spent), 1e-5).epsilon == 0
        assert accounting.pld_epsilon(spent, 1e-5) == 0


def test_unknown_costs_are_not_estimated() -> None:
    published = PublishedEvent(8, 0.25, 3, 0.01)
    spent: dict[Event, int] = {published: 5, RatioEvent(8, 0.25, 0.4): 5}
    assert accounting.pld_epsilon(spent, 1e-5) is None
    assert published.rdp([2.0, 3.0, 3.1]).tolist() == [0.01, 0.01, math.inf]
    assert accounting.epsilon(accounting.rdp(spent), 1e-5).order <= 3


@pytest.mark.parametrize(
    ("value", "text"), [(1.0001, "1.001"), (1.0, "1.000"), (0.0, "0.000"), (math.inf, "unbounded")]
)
def test_a_shown_epsilon_is_rounded_up(value: float, text: str) -> None:
    assert accounting.shown(value) == text
    assert accounting.round_up(value) >= value


@pytest.mark.parametrize("digits", [3, 4, 9])
def test_a_rounded_epsilon_does_not_grow_when_it_is_rounded_again(digits: int) -> None:
    for value in np.random.default_rng(0).uniform(0, 100, 200):
        once = accounting.round_up(value, digits)
        assert once >= value
        assert accounting.round_up(once, digits) == once


@pytest.mark.parametrize(
    ("epsilon", "text"),
    [(8.0, "8"), (8, "8"), (0.1, "0.1"), (2.0000001, "2.0000001"), (1234567.5, "1234567.5"), (None, "unbounded")],
)
def test_the_epsilon_of_a_budget_is_not_rounded(epsilon: float | None, text: str) -> None:
    assert accounting.stated(epsilon) == text
    guarantee = RatioEvent(8, 0.25, 0.4).guarantee.sentence(accounting.stated(epsilon), 1.2345678e-5, None)
    assert f"({text}, 1.2345678e-05)" in guarantee


def test_impossible_requests_are_refused() -> None:
    event = RatioEvent(8, 0.25, 0.4)
    for delta in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="delta"):
            accounting.pld_epsilon({event: 1}, delta)
    with pytest.raises(ValueError, match="count"):
        accounting.rdp({event: -1})
