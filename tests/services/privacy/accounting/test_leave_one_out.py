"""Claim: losses equal those of the leave-one-out definition, for values of all magnitudes."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from privmix.privacy.accounting.leave_one_out import losses
from tests.services.privacy.mechanism import Rows


def exactly(rows: Rows, order: int) -> list[float]:
    """Computes the losses at an integer order, in rational arithmetic except for the last logarithm."""
    parts = [[Fraction(float(x)) for x in row] for row in rows]
    parts = [[x / sum(row) for x in row] for row in parts]
    n, computed = len(parts), []
    for i in range(n):
        p = [sum(column) / n for column in zip(*parts, strict=True)]
        q = [sum(row[x] for j, row in enumerate(parts) if j != i) / (n - 1) for x in range(len(p))]
        moments = [
            sum(a**order / b ** (order - 1) for a, b in zip(*pair, strict=True) if a) for pair in ((p, q), (q, p))
        ]
        computed.append(max(math.log1p(moment - 1) for moment in moments) / (order - 1))
    return computed


@pytest.mark.parametrize("order", [2, 3, 18])
@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1.0, 12.0])
def test_losses_of_all_sizes_are_exact(order: int, spread: float) -> None:
    rng = np.random.default_rng(0)
    rows = rng.dirichlet(np.ones(12)) * np.exp(spread * rng.normal(size=(4, 12)))
    rows /= rows.sum(axis=1, keepdims=True)
    stored = torch.tensor(rows).float()
    computed = losses(stored, stored[0], order)
    np.testing.assert_allclose(computed, exactly(stored.double().numpy(), order), rtol=1e-8)


def test_large_finite_losses_are_not_infinite() -> None:
    p0 = torch.full((3,), 1 / 3)
    rows = torch.tensor([[0.6, 0.4, 0.0], [0.7, 0.3, 0.0], [0.3, 0.3, 0.4]])
    computed = losses(rows, p0, 18.0)
    assert np.isfinite(computed).tolist() == [True, True, False]
    rare = torch.tensor([[1 - 1e-10, 1e-10], [0.5, 0.5], [1 - 1e-10, 1e-10]])
    computed = losses(rare, p0[:2], 64.0)  # the powers overflow float64
    p, q = (0.5 + 2e-10) / 3, 1e-10
    assert computed[1] == pytest.approx((64 * math.log(p) - 63 * math.log(q)) / 63, rel=1e-6)


def test_without_its_only_part_the_public_model_answers() -> None:
    p0, p = torch.tensor([0.25, 0.75]), torch.tensor([[0.5, 0.5]])
    assert losses(p, p0, 2.0) == pytest.approx(max(math.log(4 / 3), math.log(5 / 4)), rel=1e-12)
