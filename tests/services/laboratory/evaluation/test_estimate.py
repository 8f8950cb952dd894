"""Claim: confidence intervals have their stated coverage."""

import math

import numpy as np
import pytest

from privmix.laboratory.evaluation.estimate import Estimate

REPEATS, RUNS = 5_000, 5


def test_intervals_cover_in_95_of_100_cases() -> None:
    values = np.random.default_rng(0).normal(3.5, 0.1, size=(REPEATS, RUNS))
    estimates = [Estimate.of_logarithms(row) for row in values.tolist()]
    intervals = [(estimate.low, estimate.high) for estimate in estimates if estimate.low and estimate.high]
    covered = np.mean([low < math.exp(3.5) < high for low, high in intervals])
    # Chance does not explain a deviation of six standard errors of 0.003.
    assert covered == pytest.approx(0.95, abs=0.02)


def test_the_mean_perplexity_is_the_perplexity_of_all_tokens() -> None:
    assert Estimate.of_logarithms([3.0, 4.0]).mean == pytest.approx(math.exp(3.5))
    assert Estimate.of_logarithms([3.0, 4.0]).runs == pytest.approx((math.exp(3), math.exp(4)))


def test_one_run_has_no_interval() -> None:
    single = Estimate.of([2.0])
    assert (single.mean, single.low, single.high) == (2.0, None, None)


def test_a_ratio_is_the_mean_of_all_values_with_the_spread_of_the_runs() -> None:
    """By hand: 12 values with the sum 6; with the same number of values in each run, it is the mean over the runs."""
    uneven = Estimate.of_ratio([1.0, 5.0, 0.0], [4, 8, 0])
    assert (uneven.mean, uneven.runs) == (0.5, (0.25, 0.625))
    assert uneven.low is not None
    assert uneven.low < 0.5
    sums = [1.0, 2.0, 6.0]
    even, plain = Estimate.of_ratio(sums, [10, 10, 10]), Estimate.of([total / 10 for total in sums])
    assert (even.mean, even.low, even.high) == pytest.approx((plain.mean, plain.low, plain.high))
    with pytest.raises(ValueError, match="all are 0"):
        Estimate.of_ratio([0.0], [0])
