"""Claim: the published mollifier follows Algorithm 1."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq

from privmix.privacy.mollifiers.renyi import mollify
from tests.services.privacy.mechanism import renyi_divergence

Row = NDArray[np.float64]


def both_directions(p: Row, p0: Row, order: float) -> float:
    return max(renyi_divergence(p, p0, order), renyi_divergence(p0, p, order))


def by_bisection(p: Row, p0: Row, order: float, bound: float) -> float:
    def excess(share: float) -> float:
        with np.errstate(divide="ignore"):
            return min(both_directions(share * p + (1 - share) * p0, p0, order) - bound, 1e6)

    return 1.0 if excess(1) <= 0 else float(brentq(excess, 0, 1, xtol=1e-14))


@pytest.mark.parametrize(("order", "bound"), [(3, 0.05), (3, 0.6), (2, 1.0), (18, 3.6), (1.5, 0.2), (3, 30.0)])
def test_lambda_is_the_largest_within_the_bound(order: float, bound: float) -> None:
    rng = np.random.default_rng(0)
    p0 = rng.dirichlet(np.full(200, 0.3))
    p0 = np.maximum(p0, 1e-10) / np.maximum(p0, 1e-10).sum()
    parts = np.concatenate([rng.dirichlet(np.full(200, 0.3), size=6), 0.9 * p0[None] + 0.1 / 200])
    parts[0, :10] = 0
    parts /= parts.sum(axis=1, keepdims=True)
    mixed = mollify(torch.tensor(parts / p0).float(), torch.tensor(p0).float(), order, bound).double().numpy()
    for p, row in zip(parts, mixed, strict=True):
        share = by_bisection(p, p0, order, bound)
        np.testing.assert_allclose(row, share * p + (1 - share) * p0, rtol=3e-4, atol=1e-9)
        assert both_directions(row, p0, order) <= bound * (1 + 1e-4)


def test_dropped_tokens_stay_dropped() -> None:
    p0, u = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([[1.9, 0.1, 0.0]])
    mixed = mollify(u, p0, 3, 0.1)
    assert float(mixed[0, 2]) == 0.0
    assert float(mixed.sum()) == pytest.approx(1)


def test_a_bound_that_float32_cannot_resolve_is_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        mollify(torch.ones(1, 2), torch.full((2,), 0.5), 3, 1e-7)
