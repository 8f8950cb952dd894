"""Claim: confidence intervals have their stated coverage."""

import math

import numpy as np
import pytest

from services.laboratory.evaluation.estimate import Estimate

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
