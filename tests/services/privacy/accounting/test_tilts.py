"""Claim (README, Theorem 4): an account's curve bounds every sum of divergences that the account pays for."""

import numpy as np
import pytest

from privmix.privacy import accounting
from privmix.privacy.accounting.tilts import account_rdp, largest_account, moment_factor

ORDERS = (1.01, 1.3, 2.0, 2.5, 4.0, 11.0, 60.0)


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 4.0])
def test_no_bounded_ratio_has_a_larger_divergence_for_its_chi_square(ratio: float) -> None:
    rng = np.random.default_rng(0)
    factors = moment_factor(ORDERS, ratio)
    for _ in range(2000):
        q = rng.dirichlet(np.full(3, rng.choice([0.05, 1.0]))) + 1e-9
        q /= q.sum()
        excess = rng.uniform(-1, 1, 3)
        excess -= q @ excess
        excess *= rng.uniform(0, 1) * min(ratio / excess.max(), 1 / -excess.min())
        chi_square = q @ excess**2
        for order, factor in zip(ORDERS, factors, strict=True):
            divergence = np.log1p(q @ np.expm1(order * np.log1p(np.maximum(excess, -1 + 1e-15)))) / (order - 1)
            assert divergence <= factor * chi_square + 1e-12


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 4.0])
def test_a_rare_token_at_the_largest_ratio_attains_the_factor(ratio: float) -> None:
    rare = 1e-9
    low = 1 - rare * ratio / (1 - rare)
    chi_square = rare * ratio**2
    for order, factor in zip(ORDERS[2:], moment_factor(ORDERS[2:], ratio), strict=True):
        moment = rare * (1 + ratio) ** order + (1 - rare) * low**order - 1
        assert 0.999 * factor <= moment / chi_square / (order - 1) <= factor * 1.001


@pytest.mark.parametrize("epsilon", [0.2, 0.5, 2.0, 8.0, 30.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
@pytest.mark.parametrize("tokens", [1, 1024, 10**7])
def test_the_largest_account_reaches_the_budget_at_its_best_order(epsilon: float, delta: float, tokens: int) -> None:
    size, ratio = largest_account(epsilon, delta, tokens)
    reached = accounting.epsilon(account_rdp(accounting.ORDERS, size, ratio), delta)
    assert 0.99999 * epsilon <= reached.epsilon < epsilon


def test_an_epsilon_without_an_account_is_refused() -> None:
    with pytest.raises(ValueError, match=r"epsilon 1e-06 at delta 1e-12 is too small"):
        largest_account(1e-6, 1e-12, 1024)


@pytest.mark.parametrize("epsilon", [2.0, 8.0])
def test_tilts_are_the_wider_the_more_a_token_may_charge(epsilon: float) -> None:
    """A larger ratio leaves a smaller account, so it is taken only where tokens can spend much."""
    accounts = [largest_account(epsilon, 1e-5, tokens) for tokens in (256, 4096, 65_536, 10**9)]
    sizes, ratios = zip(*accounts, strict=True)
    assert sorted(sizes) == list(sizes)
    assert sorted(ratios, reverse=True) == list(ratios)
    assert ratios[0] > 4 * ratios[-1]
