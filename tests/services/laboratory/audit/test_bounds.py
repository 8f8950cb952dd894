"""Claim: an audit's lower bound is below the true epsilon at its confidence, and close to it after many trials."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from privmix.laboratory.audit.bounds import (
    clopper_pearson,
    held_out_epsilons,
    one_run_epsilon,
    one_run_p_value,
    two_sample_epsilon,
)
from privmix.laboratory.audit.finding import CERTAIN

TRIALS = 200_000


def randomised_response(epsilon: float, trials: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples randomized response (Warner 1965); the true value is 1 in the first world and 0 in the second."""
    generator = np.random.default_rng(seed)
    truthful = 1 / (1 + math.exp(-epsilon))
    first, second = ((generator.random(trials) < chance).astype(float) for chance in (truthful, 1 - truthful))
    return first, second


def test_clopper_pearson_has_the_stated_coverage() -> None:
    counts = np.arange(41)
    for chance in (0.01, 0.2, 0.5, 0.93):
        low, high = clopper_pearson(counts, 40, 0.95)
        masses = binom.pmf(counts, 40, chance)
        assert masses[low > chance].sum() <= 0.05
        assert masses[high < chance].sum() <= 0.05
    assert clopper_pearson(0, 10, 0.9)[0] == 0
    assert clopper_pearson(10, 10, 0.9)[1] == 1
    assert clopper_pearson(0, 100, 0.95)[1] == pytest.approx(1 - 0.05 ** (1 / 100))


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_randomised_response_is_approached_from_below(epsilon: float) -> None:
    bounds = [
        held_out_epsilons(*randomised_response(epsilon, trials, 1), 0.0, [CERTAIN])[0] for trials in (2_000, TRIALS)
    ]
    assert bounds[0] < bounds[1] <= epsilon
    assert bounds[1] > 0.93 * epsilon


def test_the_mirrored_test_is_chosen_where_it_is_better() -> None:
    """The evidence is at low scores, which a tenth of the second world's trials have and none of the first's."""
    generator = np.random.default_rng(0)
    present, absent = np.zeros(TRIALS), -(generator.random(TRIALS) < 0.1).astype(float)
    assert held_out_epsilons(present, absent, 0.0, [CERTAIN])[0] > 5


def test_equal_worlds_prove_nothing() -> None:
    generator = np.random.default_rng(0)
    present, absent = generator.normal(size=(2, 20_000))
    assert held_out_epsilons(present, absent, 1e-5, [CERTAIN])[0] < 0.1


def test_delta_is_taken_off_the_true_positives() -> None:
    assert two_sample_epsilon(30, 1000, 0, 1000, 0.5, 0.95) == 0
    assert two_sample_epsilon(900, 1000, 1, 1000, 0.1, 0.95) < two_sample_epsilon(900, 1000, 1, 1000, 0.0, 0.95)


def test_one_run_agrees_with_the_theorem_written_out() -> None:
    planted, guesses, correct, delta, epsilon = 200, 60, 52, 1e-3, 0.8
    chance = math.exp(epsilon) / (math.exp(epsilon) + 1)
    steepest = max(
        sum(binom.pmf(correct - j, guesses, chance) for j in range(1, i + 1)) / i for i in range(1, correct + 1)
    )
    expected = binom.sf(correct - 1, guesses, chance) + 2 * planted * delta * steepest
    assert one_run_p_value(epsilon, planted, guesses, correct, delta) == pytest.approx(expected)


def test_one_run_approaches_randomised_response_from_below() -> None:
    """An independent randomized response reveals every coin."""
    generator = np.random.default_rng(3)
    epsilon, bounds = 2.0, []
    for planted in (100, 20_000):
        correct = int((generator.random(planted) < 1 / (1 + math.exp(-epsilon))).sum())
        bounds.append(one_run_epsilon(planted, planted, correct, 1e-9, CERTAIN))
    assert bounds[0] < bounds[1] <= epsilon
    assert bounds[1] > 0.9 * epsilon
