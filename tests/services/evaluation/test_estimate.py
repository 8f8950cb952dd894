"""Claim: intervals cover the mean as often as they say."""

import math

import numpy as np
import pytest

from services.evaluation.estimate import Estimate

REPEATS, RUNS = 5_000, 5


def test_intervals_cover_in_95_of_100_cases() -> None:
    values = np.random.default_rng(0).normal(3.5, 0.1, size=(REPEATS, RUNS))
    estimates = [Estimate.of_logarithms(row) for row in values.tolist()]
    covered = np.mean([each.low < math.exp(3.5) < each.high for each in estimates if each.low and each.high])
    # The seed is fixed; six standard errors of 0.003 beside it would be wrong by more than chance.
    assert covered == pytest.approx(0.95, abs=0.02)


def test_the_mean_of_perplexities_is_that_of_all_their_tokens() -> None:
    assert Estimate.of_logarithms([3.0, 4.0]).mean == pytest.approx(math.exp(3.5))
    assert Estimate.of_logarithms([3.0, 4.0]).runs == pytest.approx((math.exp(3), math.exp(4)))


def test_one_run_has_no_interval() -> None:
    single = Estimate.of([2.0])
    assert (single.mean, single.low, single.high) == (2.0, None, None)
