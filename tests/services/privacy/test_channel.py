"""Claim (privacy.md sections 4 and 9.1): no input makes the mechanism lose more than its channel, and some reach it."""

from itertools import product

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.special import logsumexp

from services.privacy.channel import log_binomial, ratio_channel, replacement_rdp
from services.privacy.pmixed import PMixed, Projection, RatioEvent
from tests.services.privacy.mechanism import (
    Rows,
    climb,
    hockey_stick,
    log_softmax,
    renyi_divergence,
    token_distribution,
)

VOCABULARY = 3
ORDERS = (1.5, 3.0, 18.0)
EPSILONS = (0.0, 0.1, 0.5)
PROJECTIONS: tuple[Projection, ...] = ("clip", "mix")


def losses(protocol: PMixed, event: RatioEvent, logits: Rows) -> list[float]:
    """Each divergence between the token's laws with and without the last part, over what the event allows for it."""
    public, *parts = log_softmax(logits)
    present = token_distribution(protocol, public, np.array(parts))
    absent = token_distribution(protocol, public, np.array(parts[:-1]))
    channel = ratio_channel(event.parts, event.q, event.radius)
    q, p = np.exp(channel.log_q), np.exp(channel.log_q + channel.log_ratio)
    shares = []
    for first, second, upper, lower in ((present, absent, p, q), (absent, present, q, p)):
        limits = [hockey_stick(upper, lower, epsilon) for epsilon in EPSILONS]
        shares += [
            hockey_stick(first, second, epsilon) / limit
            for epsilon, limit in zip(EPSILONS, limits, strict=True)
            if limit > 1e-6
        ]
        shares += [renyi_divergence(first, second, a) / rdp for a, rdp in zip(ORDERS, event.rdp(ORDERS), strict=True)]
    return shares


def replacement_losses(protocol: PMixed, event: RatioEvent, logits: Rows) -> list[float]:
    """The same for the replacement of the last part by another."""
    public, *parts, other = log_softmax(logits)
    first = token_distribution(protocol, public, np.array(parts))
    second = token_distribution(protocol, public, np.array([*parts[:-1], other]))
    allowed = event.user_rdp(ORDERS)
    return [renyi_divergence(first, second, a) / rdp for a, rdp in zip(ORDERS, allowed, strict=True)]


def ratio(parts: int, q: float, radius: float, projection: Projection = "clip") -> tuple[PMixed, RatioEvent]:
    return PMixed(parts, q, radius, projection=projection), RatioEvent(parts, q, radius)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize(("parts", "q", "radius"), [(1, 0.4, 1.0), (2, 1.0, 0.7), (2, 0.3, 2.0), (3, 0.5, 0.4)])
def test_no_input_loses_more_than_the_channel(parts: int, q: float, radius: float, projection: Projection) -> None:
    protocol, event = ratio(parts, q, radius, projection)
    rng = np.random.default_rng(parts)
    found, _ = climb(lambda x: max(losses(protocol, event, x)), (parts + 1, VOCABULARY), 60, rng)
    assert found <= 1


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize(("parts", "q", "radius"), [(1, 0.4, 1.0), (2, 1.0, 0.7)])
def test_some_input_loses_as_much_as_the_channel(parts: int, q: float, radius: float, projection: Projection) -> None:
    protocol, event = ratio(parts, q, radius, projection)
    rng = np.random.default_rng(1)
    found, _ = climb(lambda x: max(losses(protocol, event, x)), (parts + 1, VOCABULARY), 200, rng)
    assert 0.999 <= found <= 1


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_a_mollifier_with_twice_the_radius_is_caught(projection: Projection) -> None:
    event = RatioEvent(2, 0.5, 0.5)
    broken = PMixed(2, 0.5, 2 * event.radius, projection=projection)
    found, _ = climb(lambda x: max(losses(broken, event, x)), (3, VOCABULARY), 60, np.random.default_rng(0))
    assert found > 1.5


@pytest.mark.parametrize(("parts", "q", "radius"), [(1, 0.4, 1.0), (2, 0.5, 0.7), (3, 1.0, 0.5)])
def test_no_replacement_loses_more_than_the_linear_program(parts: int, q: float, radius: float) -> None:
    protocol, event = ratio(parts, q, radius)
    rng = np.random.default_rng(parts)
    found, _ = climb(lambda x: max(replacement_losses(protocol, event, x)), (parts + 2, VOCABULARY + 1), 60, rng)
    assert found <= 1


def test_some_replacement_loses_as_much_as_the_linear_program() -> None:
    protocol, event = ratio(1, 0.7, 0.8)
    rng = np.random.default_rng(1)
    found, _ = climb(lambda x: max(replacement_losses(protocol, event, x)), (3, VOCABULARY), 300, rng)
    assert 0.999 <= found <= 1


def test_the_channel_is_a_pair_of_distributions() -> None:
    for parts, q, radius in product((1, 2, 80), (0.03, 1.0), (0.001, 1.6, 12.0)):
        channel = ratio_channel(parts, q, radius)
        assert logsumexp(channel.log_q) == pytest.approx(0, abs=1e-12)
        assert logsumexp(channel.log_q + channel.log_ratio) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("parts", "q", "radius"), [(1, 0.4, 1.0), (3, 0.5, 0.4), (20, 0.1, 2.5), (2, 1.0, 5.0)])
def test_replacement_agrees_with_a_linear_programming_solver(parts: int, q: float, radius: float) -> None:
    corners = np.array(list(product((np.exp(-radius), np.exp(radius)), repeat=3)))
    chances = np.exp(log_binomial(parts - 1, q))
    for order in (1.5, 4.0):
        moment = 0.0
        for m, chance in enumerate(chances):
            others, new, old = (np.where(m, corners[:, 0], 1.0), *corners.T[1:])
            p, q_ = others + q * (new - others) / (m + 1), others + q * (old - others) / (m + 1)
            means = np.vstack([np.ones(8), corners.T]) if m else np.vstack([np.ones(8), corners.T[1:]])
            solved = linprog(-(p**order * q_ ** (1 - order)), A_eq=means, b_eq=np.ones(len(means)))
            moment -= chance * solved.fun
        expected = np.log(moment) / (order - 1)
        assert replacement_rdp(parts, q, radius, [order])[0] == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("orders", [[1.0], [0.5, 2.0], [np.inf], [np.nan]])
def test_orders_not_above_one_are_refused(orders: list[float]) -> None:
    with pytest.raises(ValueError, match="orders"):
        RatioEvent(2, 0.5, 1.0).rdp(orders)
