"""Computes lower bounds on epsilon, at a stated confidence, from the success of an attack."""

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import bisect
from scipy.stats import beta, binom

from privmix.privacy.arrays import Reals

# The largest epsilon of a search.
_MAX_EPSILON = 200.0


def clopper_pearson(count: ArrayLike, total: int, confidence: float) -> tuple[Reals, Reals]:
    """Returns exact bounds on a probability after ``count`` successes in ``total``, one-sided at ``confidence``."""
    counts = np.asarray(count, dtype=np.float64)
    low = np.where(counts > 0, beta.ppf(1 - confidence, np.maximum(counts, 1), total - counts + 1), 0.0)
    high = np.where(counts < total, beta.ppf(confidence, counts + 1, np.maximum(total - counts, 1)), 1.0)
    return np.asarray(low), np.asarray(high)


def two_sample_epsilon(
    hits: ArrayLike, positives: int, alarms: ArrayLike, negatives: int, delta: float, confidence: float
) -> Reals:
    """Bounds epsilon from below by a test with ``hits`` among ``positives`` and false ``alarms`` among ``negatives``.

    (epsilon, delta)-differential privacy bounds every test's true-positive rate by e^epsilon times its false-positive
    rate plus delta (Kairouz, Oh, Viswanath 2015). The Clopper-Pearson bounds on the two rates share the error
    probability equally.
    """
    one_sided = 1 - (1 - confidence) / 2
    least, _ = clopper_pearson(hits, positives, one_sided)
    _, most = clopper_pearson(alarms, negatives, one_sided)
    return np.asarray(np.log(np.maximum((least - delta) / most, 1.0)))


def one_run_p_value(epsilon: float, planted: int, guesses: int, correct: int, delta: float) -> float:
    """Bounds the probability of at least ``correct`` correct guesses under (epsilon, delta)-differential privacy.

    Steinke, Nasr, Jagielski 2023, Theorem 5.2: a fair coin includes each of ``planted`` users, and the auditor guesses
    ``guesses`` of the coins. Without delta, Binomial(guesses, e^eps / (e^eps + 1)) dominates the number of correct
    guesses; delta adds at most 2 planted delta max_i P[correct > Binomial >= correct - i] / i.

    Raises:
        ValueError: the numbers contradict each other.
    """
    if not 0 <= correct <= guesses <= planted:
        raise ValueError(f"correct <= guesses <= planted must hold, got {correct}, {guesses} and {planted}")
    chance = 1 / (1 + np.exp(-epsilon))
    below = np.arange(correct - 1, -1, -1)
    steepest = (np.cumsum(binom.pmf(below, guesses, chance)) / np.arange(1, correct + 1)).max(initial=0.0)
    return float(min(1.0, binom.sf(correct - 1, guesses, chance) + 2 * planted * delta * steepest))


def one_run_epsilon(planted: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """Returns the largest epsilon that the guesses rule out at ``confidence``; 0 if they rule out none."""

    def excess(epsilon: float) -> float:
        return one_run_p_value(epsilon, planted, guesses, correct, delta) - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    if excess(_MAX_EPSILON) < 0:
        return _MAX_EPSILON
    low, high = 0.0, _MAX_EPSILON
    return max(0.0, float(bisect(excess, low, high, xtol=1e-9)) - 1e-9)


def correct_guesses(coins: ArrayLike, scores: Reals, guesses: int) -> int:
    """Guesses that the highest scores belong to included users and the lowest to others; counts correct guesses."""
    order = np.argsort(scores, kind="stable")
    included = np.asarray(coins, np.bool_)[order]
    half = guesses // 2
    return int((~included[:half]).sum() + included[len(included) - (guesses - half) :].sum())
