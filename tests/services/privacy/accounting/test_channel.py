"""Claim (README, Theorem 1): the pair bounds the cost of every replacement of a part of PMixed, and is attained."""

from itertools import product

import numpy as np
import pytest
from mpmath import mp, mpf
from scipy.optimize import linprog

from privmix.laboratory.audit.distributions import pair_laws
from privmix.laboratory.audit.worlds import worst_of_pmixed
from privmix.privacy import accounting
from privmix.privacy.accounting.channel import WorstCaseRatios
from privmix.privacy.mollifiers.projection import Projection
from privmix.privacy.protocols.pmixed import PMixed, RatioEvent
from tests.services.privacy.mechanism import Rows, hockey_stick, renyi_divergence

ORDERS = (1.5, 3.0, 18.0)
EPSILONS = np.array([0.0, 0.05, 0.2])
PROJECTIONS: tuple[Projection, ...] = ("clip", "mix")
SETTINGS = [(1, 0.4, 1.0), (2, 1.0, 0.5), (2, 0.3, 2.0), (3, 0.5, 0.4), (4, 1.0, 1.2)]


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize(("parts", "q", "radius"), SETTINGS)
def test_the_corners_attain_the_cost_of_the_channel(
    parts: int, q: float, radius: float, projection: Projection
) -> None:
    pair = worst_of_pmixed(parts, q, radius)
    before, after = pair_laws(PMixed(parts, q, radius, projection=projection), pair)
    for order, bound in zip(ORDERS, RatioEvent(parts, q, radius).rdp(ORDERS), strict=True):
        assert 0.999 * bound <= renyi_divergence(before, after, order) <= bound
    limits = WorstCaseRatios.of(parts, q, radius).hockey_stick(EPSILONS)
    for epsilon, limit in zip(EPSILONS, limits, strict=True):
        assert 0.999 * limit <= hockey_stick(before, after, epsilon) <= limit


@pytest.mark.parametrize(("parts", "q", "radius"), [*SETTINGS, (20, 0.1, 2.5), (2, 1.0, 5.0), (80, 0.03, 1.6)])
def test_no_distribution_over_the_corners_has_a_larger_divergence(parts: int, q: float, radius: float) -> None:
    """Solves a linear program over all eight corners of (others, before, after), for each order and hockey-stick."""
    public = (1 - q) ** parts
    corners = np.array(list(product((np.exp(-radius), np.exp(radius)), repeat=3)))
    others, before, after = corners.T
    p, q_ = (public + (1 - public) * ((parts - 1) * others + own) / parts for own in (before, after))
    means = np.vstack([np.ones(8), corners.T])

    def largest(divergence: Rows) -> float:
        scale = divergence.max() or 1.0
        return -scale * float(linprog(-divergence / scale, A_eq=means, b_eq=np.ones(4)).fun)

    event = RatioEvent(parts, q, radius)
    for order in (1.5, 4.0, 12.0):
        excess = largest(p**order * q_ ** (1 - order) - order * p - (1 - order) * q_)
        assert event.rdp([order])[0] == pytest.approx(np.log1p(excess) / (order - 1), rel=1e-6)
    hockey_sticks = WorstCaseRatios.of(parts, q, radius).hockey_stick(EPSILONS)
    for epsilon, delta in zip(EPSILONS, hockey_sticks, strict=True):
        assert delta == pytest.approx(largest(np.maximum(0, p - np.exp(epsilon) * q_)), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(("parts", "q", "radius"), SETTINGS)
def test_the_privacy_loss_distribution_has_these_hockey_sticks(parts: int, q: float, radius: float) -> None:
    composed = RatioEvent(parts, q, radius).pld()
    for epsilon, delta in zip(EPSILONS, WorstCaseRatios.of(parts, q, radius).hockey_stick(EPSILONS), strict=True):
        assert delta - 1e-12 <= composed.get_delta_for_epsilon(float(epsilon)) <= delta + 1e-6


@pytest.mark.parametrize("q", [1.0, 0.5, 1e-3, 1e-9, 1e-15, 1.6e-16, 5e-17, 6e-20])
@pytest.mark.parametrize(("parts", "radius"), [(1, 0.3), (2, 2.0), (64, 1.0), (64, 9.0), (1000, 1e-3), (8, 0.004)])
def test_divergences_are_those_of_eighty_digits(parts: int, q: float, radius: float) -> None:
    """At the largest orders too. A draw that is made at all is never free, however rare it is."""
    orders = [1.0625, 1.5, 2.0, 16.0, 257.0, 1e4, 1e6, float(accounting.ORDERS[-1])]
    with mp.workdps(80):
        high, low = mp.exp(radius), mp.exp(-radius)
        public, mass = (1 - mpf(q)) ** parts, 1 / (high + 1)

        def value(others: mpf, own: mpf) -> mpf:
            return public + (1 - public) * ((parts - 1) * others + own) / parts

        shared = max(mpf(0), 3 * mass - 1)
        corners = [
            (mass, value(low, high), value(low, low)),
            (mass - shared, value(low, low), value(low, high)),
            (shared, value(high, low), value(high, high)),
        ]

        def divergence(order: float, before: int) -> mpf:
            """From one world to the other; all other tokens are as likely in both."""
            moment = mpf(1)
            for chance, *values in corners:
                p, q_ = values[before], values[1 - before]
                moment += chance * q_ * ((p / q_) ** mpf(order) - 1)
            return mp.log(moment) / (mpf(order) - 1)

        expected = [float(max(divergence(order, before) for before in (0, 1))) for order in orders]
        apart = float(mass * (value(low, high) - value(low, low)))
    found = RatioEvent(parts, q, radius).rdp(orders)
    assert found == pytest.approx(expected, rel=1e-9, abs=0.0)
    assert (found > 0).all()
    nothing = WorstCaseRatios.of(parts, q, radius).hockey_stick(np.zeros(1))[0]
    assert nothing == pytest.approx(apart, rel=1e-12, abs=0.0)


def test_a_huge_radius_costs_the_largest_loss() -> None:
    """Of one part that is always drawn: where its ratios leave the digits of each other, no moment is a NaN."""
    for radius in (18.0, 20.0, 40.0, 300.0):
        found = RatioEvent(1, 1.0, radius).rdp([1.5, 4.0, 1e6])
        assert (np.diff(found) >= 0).all()
        assert found[-1] == pytest.approx(2 * radius, rel=1e-4)


@pytest.mark.parametrize("orders", [[1.0], [0.5, 2.0], [np.inf], [np.nan]])
def test_orders_not_above_one_are_refused(orders: list[float]) -> None:
    with pytest.raises(ValueError, match="orders"):
        RatioEvent(2, 0.5, 1.0).rdp(orders)
