"""Claim: a plan finds the radius of a small epsilon, and the ledger that it makes grants every token of the plan.

The table compares planned radii with a search by brute force: it composes the pair of distributions that dominates a
token (README, Theorem 1) by counting, without Rényi divergences and without a grid of losses.
"""

import math

import numpy as np
import pytest
from mpmath import mp, mpf
from scipy.optimize import brentq

from privmix.budget.filter import Filter, counted
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.privacy import accounting
from privmix.privacy.accounting.bounded_range import bounded_range_rdp, sampled_rdp
from privmix.privacy.protocols.exponential import ExponentialSettings
from privmix.privacy.protocols.gnmax import GNMaxSettings
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.privacy.protocols.pmixed import PMixedSettings
from privmix.privacy.protocols.subsample_aggregate import SubsampleAggregateSettings
from privmix.privacy.settings import Settings

# parts, q, tokens, epsilon, delta, and the share of the largest radius that a plan must reach
TABLE = [
    (80, 1.0, 1, 0.01, 1e-5, 0.99),
    (80, 1.0, 1, 0.001, 1e-12, 0.98),
    (8, 1.0, 1, 0.001, 1e-5, 0.99),
    (16, 1.0, 4, 0.001, 1e-12, 0.95),
    (80, 0.03, 1, 0.01, 1e-9, 0.99),
    (80, 1.0, 16, 0.01, 1e-9, 0.9),
    (80, 1.0, 64, 0.1, 1e-12, 0.9),
    (16, 1.0, 256, 0.05, 1e-5, 0.9),
    (8, 1.0, 1024, 1.0, 1e-6, 0.9),
]


def delta_by_counting(parts: int, q: float, radius: float, tokens: int, epsilon: float) -> float:
    """Returns the exact delta of `tokens` tokens. A token is more, less or as likely in the other world."""
    high, low, public = math.exp(radius), math.exp(-radius), (1 - q) ** parts
    mass = 1 / (high + 1)
    more = mass * (public + (1 - public) * ((parts - 1) * low + high) / parts)
    less = mass * (public + (1 - public) * low)
    one = np.array([less, 1 - more - less, more])  # the chances of the losses -1, 0 and 1, times their size
    chances = np.ones(1)
    for _ in range(tokens):
        chances = np.convolve(chances, one)
    losses = np.arange(-tokens, tokens + 1) * math.log(more / less)
    return float(chances @ -np.expm1(np.minimum(0.0, epsilon - losses)))


@pytest.mark.parametrize(("parts", "q", "tokens", "epsilon", "delta", "share"), TABLE)
def test_a_plan_is_close_to_the_radius_by_brute_force(
    parts: int, q: float, tokens: int, epsilon: float, delta: float, share: float
) -> None:
    def excess(log_radius: float) -> float:
        return delta_by_counting(parts, q, math.exp(log_radius), tokens, epsilon) - delta

    largest = math.exp(brentq(excess, math.log(1e-7), math.log(8.0), xtol=1e-10))
    planned = PMixedSettings(q=q, epsilon=epsilon, delta=delta, tokens=tokens).plan(parts).radius
    assert planned is not None
    assert share * largest <= planned <= largest


def largest_log_moment(order: float, eta: float) -> mpf:
    """README, Theorem 2."""
    a, range_ = mpf(order), mpf(eta)
    x = a / (a - 1) * (1 - mp.exp((1 - a) * range_)) / (1 - mp.exp(-a * range_))
    return mp.log(((x - 1) * mp.exp(a * range_) + mp.exp(range_) - x) * x**-a / (mp.exp(range_) - 1))


@pytest.mark.parametrize("eta", [1e-7, 2.4e-6, 4.7e-5, 3.1e-4, 1.9e-3, 2.1e-3, 0.02])
def test_no_range_is_so_small_that_its_cost_is_below_that_of_fifty_digits(eta: float) -> None:
    orders = [1.0625, 1.5, 2.0, 10.5, 36.8, 257.0]
    claims = bounded_range_rdp(orders, eta)
    with mp.workdps(50):
        for order, claim in zip(orders, claims, strict=True):
            a, exact = mpf(order), largest_log_moment(order, eta)
            assert exact <= mpf(float(claim)) * (a - 1) <= exact + mpf(2) ** -47


LARGE = [257.0, 1e4, 1e6, float(accounting.ORDERS[-1])]


@pytest.mark.parametrize("order", LARGE)
@pytest.mark.parametrize("eta", [1e-5, 1e-3, 0.02, 0.4, 3.0])
def test_divergences_at_large_orders_are_those_of_fifty_digits(eta: float, order: float) -> None:
    """README, Theorem 2; and the worst input that is known of Theorem 3 costs no more than its bound."""
    with mp.workdps(50):
        a, least = mpf(order), 1 / mp.exp(eta)
        assert bounded_range_rdp([order], eta)[0] == pytest.approx(
            float(largest_log_moment(order, eta) / (a - 1)), rel=1e-8
        )
        for drawn in (0.01, 0.1, 0.5):
            bound = sampled_rdp([order], eta, drawn)[0]
            for share in np.linspace(0.01, 0.99, 25):
                low = least**share
                high, g = low / least, mpf(drawn)
                mass = (1 - low) / (high - low)
                mixed = (1 - g + g * high, 1 - g + g * low)
                moments = [mass * mixed[0] ** power + (1 - mass) * mixed[1] ** power for power in (a, 1 - a)]
                assert float(mp.log(max(moments)) / (a - 1)) <= bound


SETTINGS = [PMixedSettings, ExponentialSettings, GNMaxSettings, SubsampleAggregateSettings]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("tokens", "epsilon", "delta"), [(1, 0.01, 1e-5), (1, 0.001, 1e-12), (3, 0.02, 1e-12), (64, 0.1, 1e-5)]
)
def test_a_ledger_grants_what_its_plan_promises(
    settings: type[Settings], tokens: int, epsilon: float, delta: float
) -> None:
    chosen = settings.model_validate({"epsilon": epsilon, "delta": delta, "tokens": tokens})
    protocol = chosen.plan(80)
    terms = counted(PrivacyBudget.of("clinic", chosen, protocol), protocol.event, chosen.planned)
    assert Filter(terms).affordable({}, protocol.event) >= tokens
    assert Filter(terms).epsilon({protocol.event: tokens}) <= epsilon
    again = chosen.plan(80, terms.accountant)
    assert again.event == protocol.event, "a service that starts again serves the same tokens"


def test_an_epsilon_too_small_for_tilts_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match="train more parts"):
        IndividualSettings(epsilon=0.001, delta=1e-12).plan(80)
