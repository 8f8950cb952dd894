"""Claim: the choice among public candidates by private losses costs a user at most epsilon, and up to epsilon."""

from fractions import Fraction
from itertools import product
from math import exp
from typing import Any

import numpy as np
import pytest

from privmix.privacy import accounting
from privmix.privacy.events import from_json
from privmix.privacy.sampling.selection import (
    LOSS_UNITS,
    SelectionEvent,
    integer_weights,
    loss_units,
    rate,
    select,
)
from tests.services.privacy.mechanism import hockey_stick, renyi_divergence

EPSILONS = (0.01, 0.5, 2.0, 8.0)
ORDERS = (1.06, 2.0, 7.5, 40.0)


def chances(losses: Any, event: SelectionEvent) -> list[Fraction]:
    """Returns the exact distribution of the choice."""
    weights = integer_weights(np.asarray(losses, dtype=np.int64), event)[0].tolist()
    return [Fraction(weight, sum(weights)) for weight in weights]


def neighbours(rng: np.random.Generator) -> tuple[Any, Any]:
    """Returns total losses of two tables that differ in one user, whose losses are mostly near 0 and 1."""
    candidates = int(rng.integers(2, 6))
    others = rng.integers(0, 50 * LOSS_UNITS, size=candidates) if rng.random() < 0.5 else np.zeros(candidates, int)
    first, second = rng.choice([0, LOSS_UNITS, LOSS_UNITS // 3], size=(2, candidates))
    return others + first, others + second


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_no_pair_of_tables_exceeds_epsilon_or_the_divergences(epsilon: float) -> None:
    event, rng = SelectionEvent(epsilon), np.random.default_rng(0)
    allowed, bound = event.rdp(ORDERS), Fraction(exp(epsilon))
    for _ in range(300):
        tables = neighbours(rng)
        p, q = (chances(losses, event) for losses in tables)
        assert all(a <= bound * b and b <= bound * a for a, b in zip(p, q, strict=True))
        floats = [np.array(law, dtype=np.float64) for law in (p, q)]
        for order, most in zip(ORDERS, allowed, strict=True):
            assert renyi_divergence(floats[0], floats[1], order) <= most * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_some_pair_of_tables_costs_nearly_all_of_it(epsilon: float) -> None:
    """One of very many candidates improves by 1, and all others get worse by 1."""
    event = SelectionEvent(epsilon)
    many = 4096
    first, second = np.full(many, LOSS_UNITS), np.zeros(many, dtype=np.int64)
    first[0], second[0] = 0, LOSS_UNITS
    p, q = (chances(losses, event) for losses in (first, second))
    # Nearly all mass stays with the others, so the normalizers cancel and log p(first) moves by epsilon.
    assert float(p[0] / q[0]) >= exp(0.97 * epsilon)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_no_two_valued_ratio_exceeds_the_privacy_loss_distribution(epsilon: float) -> None:
    event = SelectionEvent(epsilon)
    pld = event.pld()
    for z in (0.0, 0.3 * epsilon, 0.9 * epsilon):
        largest = 0.0
        for share in np.linspace(0.001, 0.999, 300):
            low, high = exp(-share * epsilon), exp((1 - share) * epsilon)
            mass = (1 - low) / (high - low)
            q = np.array([mass, 1 - mass])
            largest = max(largest, hockey_stick(q * [high, low], q, z))
        assert largest <= pld.get_delta_for_epsilon(z) <= largest + 2e-4
    assert pld.get_epsilon_for_delta(1e-9) <= epsilon + 1e-3


def test_rounds_add_up() -> None:
    four, single = SelectionEvent(2.0, rounds=4), SelectionEvent(0.5)
    np.testing.assert_allclose(four.rdp(ORDERS), 4 * single.rdp(ORDERS))
    assert rate(four, 64) == rate(single, 64)
    joint, composed = four.pld(), single.pld().self_compose(4)
    assert joint.get_delta_for_epsilon(1.0) == pytest.approx(composed.get_delta_for_epsilon(1.0))


def test_capping_far_candidates_keeps_the_range() -> None:
    """Uses losses near the cap, where one table caps a candidate and the other does not."""
    event = SelectionEvent(4.0)
    at = int(20 / rate(event, 3) * LOSS_UNITS)
    base = np.array([2 * LOSS_UNITS, 2 * LOSS_UNITS + at, 5 * LOSS_UNITS + at])
    p = chances(base, event)
    for move in product((-LOSS_UNITS, 0, LOSS_UNITS), repeat=3):
        q = chances(base + np.array(move), event)
        assert max(max(a / b, b / a) for a, b in zip(p, q, strict=True)) <= Fraction(exp(4.0))


def test_losses_are_clipped_and_invalid_losses_count_as_largest() -> None:
    clipped = loss_units([-1.0, 0.0, 0.25, 1.0, 3.0, np.nan, np.inf, -np.inf])
    units = [0, 0, LOSS_UNITS // 4, LOSS_UNITS, LOSS_UNITS, LOSS_UNITS, LOSS_UNITS, 0]
    assert clipped.tolist() == units


def test_candidates_are_chosen_in_proportion_to_their_weights() -> None:
    event = SelectionEvent(2.0)
    losses = np.array([0, LOSS_UNITS], dtype=np.int64)
    share = np.mean([select(losses, event) == 0 for _ in range(4000)])
    assert abs(share - 1 / (1 + exp(-rate(event, 2)))) < 0.04  # five standard deviations


def test_the_event_survives_storage_and_is_paid_once() -> None:
    event = SelectionEvent(1.5, "user", 3, "abc")
    assert from_json(event.to_json()) == event
    assert event.guarantee.status == "certified"
    orders = np.array([2.0])
    assert accounting.rdp({event: 5}, orders) == event.rdp(orders)
    assert accounting.rdp({event: 1, SelectionEvent(1.5, run="other"): 1}, orders) > event.rdp(orders)


def test_too_many_candidates_for_integer_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="candidates"):
        rate(SelectionEvent(1e-6), 2**20)
