"""Claim: sampling draws a token with probability exactly weight / total."""

import math
from collections import Counter

import pytest
import torch

from privmix.privacy.sampling.categorical import TOTAL, accumulated, draw, quantise, sample, tokens_at


def test_frequencies_are_those_of_the_weights() -> None:
    weights = torch.tensor([[1, 0, 5, 4], [2**60, 2**60, 0, 2**61]])
    draws = 20_000
    tokens = sample(weights.repeat(draws, 1))
    for row, chances in enumerate((weights.double() / weights.sum(1, keepdim=True)).tolist()):
        counts = Counter(tokens[row::2])
        for token, chance in enumerate(chances):
            assert abs(counts[token] - draws * chance) <= 7 * math.sqrt(draws * chance * (1 - chance))


def test_a_weight_of_one_in_a_huge_total_is_counted() -> None:
    """Floating-point cumulative sums would lose this weight; the boundaries between tokens are exact."""
    weights = torch.tensor([[2**61, 1, 0, 2**61 - 2]])
    assert set(sample(weights.repeat(2000, 1))) <= {0, 1, 3}
    assert sample(torch.tensor([[0, 1, 0]] * 50)) == [1] * 50


def test_quantised_weights_are_proportional_and_add_without_overflow() -> None:
    weights = torch.rand(5, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 8
    exact = quantise(weights * torch.tensor([[1e-20], [1.0], [1e20], [3.0], [0.1]], dtype=torch.float64))
    totals = exact.sum(dim=1)
    assert bool(((totals > TOTAL // 4) & (totals < TOTAL)).all())
    assert torch.allclose(
        exact.double() / totals[:, None].double(), weights / weights.sum(1, keepdim=True), rtol=0, atol=1e-15
    )


@pytest.mark.parametrize("row", [[0.0, 0.0], [1.0, -1e-9], [1.0, math.nan], [1.0, math.inf]])
def test_weights_that_are_not_a_distribution_are_refused(row: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be finite and non-negative"):
        quantise(torch.tensor([[1.0, 1.0], row]))


def test_rows_without_mass_and_floating_point_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="no mass"):
        sample(torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="int64"):
        sample(torch.ones(1, 3))
    assert sample(torch.zeros(0, 3, dtype=torch.int64)) == []


def test_each_token_has_as_many_points_as_its_weight() -> None:
    weights = torch.tensor([[3, 0, 1, 2], [0, 5, 0, 1]])
    cumulative = accumulated(weights)
    assert cumulative[:, -1].tolist() == [6, 6]
    picked = torch.stack([tokens_at(torch.tensor([point, point]), cumulative) for point in range(6)], dim=1)
    assert picked.tolist() == [[0, 0, 0, 2, 3, 3], [1, 1, 1, 1, 1, 3]]


def test_points_are_below_their_totals_and_reach_all_of_them() -> None:
    points = [draw([1, 3, 2**61]) for _ in range(200)]
    assert {one for one, _, _ in points} == {0}
    assert {three for _, three, _ in points} == {0, 1, 2}
    assert max(huge for _, _, huge in points) > 2**60
    for total in (0, -1):
        with pytest.raises(ValueError, match="no mass"):
            draw([5, total])
