"""From what an attack got right to a lower bound on epsilon that holds with a stated confidence."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import bisect
from scipy.stats import beta, binom

Reals = NDArray[np.float64]

# Epsilons are looked for below this.
_LARGEST = 200.0


def clopper_pearson(count: ArrayLike, total: int, confidence: float) -> tuple[Reals, Reals]:
    """Exact bounds on a chance of which ``count`` of ``total`` came true, each one-sided at ``confidence``."""
    counts = np.asarray(count, dtype=np.float64)
    low = np.where(counts > 0, beta.ppf(1 - confidence, np.maximum(counts, 1), total - counts + 1), 0.0)
    high = np.where(counts < total, beta.ppf(confidence, counts + 1, np.maximum(total - counts, 1)), 1.0)
    return np.asarray(low), np.asarray(high)


def two_sample_epsilon(
    hits: ArrayLike, positives: int, alarms: ArrayLike, negatives: int, delta: float, confidence: float
) -> Reals:
    """Lower bound on epsilon from a test that says "positive" to ``hits`` of ``positives``, and to false ``alarms``.

    (epsilon, delta)-differential privacy bounds every test's true-positive rate by e^epsilon times its false-positive
    rate plus delta (Kairouz, Oh, Viswanath 2015). Both rates are bounded by Clopper and Pearson, and share what the
    confidence leaves.
    """
    each = 1 - (1 - confidence) / 2
    least, _ = clopper_pearson(hits, positives, each)
    _, most = clopper_pearson(alarms, negatives, each)
    return np.asarray(np.log(np.maximum((least - delta) / most, 1.0)))


def one_run_p_value(epsilon: float, planted: int, guesses: int, correct: int, delta: float) -> float:
    """Chance that (epsilon, delta)-differential privacy lets so many guesses be right.

    Steinke, Nasr, Jagielski 2023, Theorem 5.2: each of ``planted`` users was included by a fair coin, and the auditor
    guessed ``guesses`` of the coins. Without delta the correct ones are dominated by Binomial(guesses, e^eps / (e^eps +
    1)); delta adds at most 2 planted delta max_i P[correct > Binomial >= correct - i] / i.
    """
    if not 0 <= correct <= guesses <= planted:
        raise ValueError(f"correct <= guesses <= planted must hold, got {correct}, {guesses} and {planted}")
    chance = 1 / (1 + np.exp(-epsilon))
    below = np.arange(correct - 1, -1, -1)
    steepest = (np.cumsum(binom.pmf(below, guesses, chance)) / np.arange(1, correct + 1)).max(initial=0.0)
    return float(min(1.0, binom.sf(correct - 1, guesses, chance) + 2 * planted * delta * steepest))


def one_run_epsilon(planted: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """The largest epsilon that the guesses rule out at ``confidence``; 0 where they rule out none."""

    def excess(epsilon: float) -> float:
        return one_run_p_value(epsilon, planted, guesses, correct, delta) - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    if excess(_LARGEST) < 0:
        return _LARGEST
    low, high = 0.0, _LARGEST
    return max(0.0, float(bisect(excess, low, high, xtol=1e-9)) - 1e-9)
