"""Computes lower bounds on epsilon, at a stated confidence, from the success of an attack."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import bisect
from scipy.stats import beta, binom, mannwhitneyu

from privmix.privacy.arrays import Reals

# The maximum number of thresholds.
_MAX_THRESHOLDS = 2000
# The confidence for the choice of a test, between the two confidences of its evaluation.
_CHOICE_CONFIDENCE = 0.999
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


def area(positive: Reals, negative: Reals) -> float:
    """Returns the area under the curve of scores in two worlds (Mann & Whitney); random guesses give 1/2."""
    return float(mannwhitneyu(positive, negative, method="asymptotic").statistic) / (len(positive) * len(negative))


def correct_guesses(coins: ArrayLike, scores: Reals, guesses: int) -> int:
    """Guesses that the highest scores belong to included users and the lowest to others; counts correct guesses."""
    order = np.argsort(scores, kind="stable")
    included = np.asarray(coins, np.bool_)[order]
    half = guesses // 2
    return int((~included[:half]).sum() + included[len(included) - (guesses - half) :].sum())


Test = tuple[bool, float]
"""Says "present" at scores of at least a threshold; mirrored, "absent" where their negatives reach it."""


def best_test(present: Reals, absent: Reals, delta: float, confidence: float) -> Test:
    """Returns the test with the largest lower bound on epsilon for these scores."""
    found = []
    for mirrored, (first, second) in enumerate(((present, absent), (-absent, -present))):
        thresholds = _thresholds(first, second)
        bounds = _bound(first, second, thresholds, delta, confidence)
        found.append((float(bounds.max()), -mirrored, float(thresholds[bounds.argmax()])))
    _, mirrored, threshold = max(found)
    return bool(mirrored), threshold


def epsilon_of(test: Test, present: Reals, absent: Reals, delta: float, confidence: float) -> float:
    """Bounds epsilon from below by scores that did not take part in the choice of the test."""
    mirrored, threshold = test
    worlds = (-absent, -present) if mirrored else (present, absent)
    return float(_bound(*worlds, np.array([threshold]), delta, confidence)[0])


def held_out_epsilons(present: Reals, absent: Reals, delta: float, confidences: Sequence[float]) -> list[float]:
    """Bounds epsilon from below. One half of the scores in each world chooses the test; the other gives the bounds."""
    (choosing, measured), (choosing_without, measured_without) = (
        np.array_split(scores, 2) for scores in (present, absent)
    )
    test = best_test(choosing, choosing_without, delta, _CHOICE_CONFIDENCE)
    return [epsilon_of(test, measured, measured_without, delta, confidence) for confidence in confidences]


def _bound(first: Reals, second: Reals, thresholds: Reals, delta: float, confidence: float) -> Reals:
    hits, alarms = (len(scores) * _reaching(scores, thresholds) for scores in (first, second))
    return two_sample_epsilon(hits, len(first), alarms, len(second), delta, confidence)


def _reaching(scores: Reals, thresholds: Reals) -> Reals:
    return np.asarray(1 - np.searchsorted(np.sort(scores), thresholds) / len(scores))


def _thresholds(first: Reals, second: Reals) -> Reals:
    """Returns thresholds in descending order."""
    values = np.unique(np.concatenate([first, second]))[::-1]
    if len(values) > _MAX_THRESHOLDS:
        values = values[np.unique(np.linspace(0, len(values) - 1, _MAX_THRESHOLDS).astype(int))]
    return np.asarray(values)
