"""Computes lower bounds on epsilon, at a stated confidence, from the success of an attack."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import ArrayLike
from scipy.optimize import bisect
from scipy.stats import beta, binom

from privmix.privacy.arrays import Reals

# The largest epsilon of a search.
_MAX_EPSILON = 200.0
# The number of points of a trade-off curve, and the smallest p-value that is distinguished from 0.
_CURVE_POINTS, _LEAST_P_VALUE = 400, 1e-30


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


@dataclass(frozen=True, eq=False)
class TradeOff:
    """A trade-off function f (Dong, Roth, Su 2022), as the hockey-stick divergences that it allows.

    ``P[E] <= e^epsilon Q[E] + delta(epsilon)`` for every event E and both orders of P and Q, at a finite grid of
    epsilons. The grid allows more than the exact function, so bounds from it are weaker, but valid.

    Attributes:
        epsilons: float64 [K], at least 0.
        deltas: float64 [K].
    """

    epsilons: Reals
    deltas: Reals

    @classmethod
    def of_pld(cls, pld: PrivacyLossDistribution) -> Self:
        """Returns the curve of a dominating pair, up to the epsilon at which delta is 1e-12."""
        epsilons = np.linspace(0.0, min(_MAX_EPSILON, max(1e-3, pld.get_epsilon_for_delta(1e-12))), _CURVE_POINTS)
        return cls(epsilons, np.asarray(pld.get_delta_for_epsilon(epsilons)))

    def least(self, chance: float) -> float:
        """Returns the smallest probability in one world of an event with probability ``chance`` in the other."""
        below = (chance - self.deltas) * np.exp(-self.epsilons)
        above = 1 - self.deltas - np.exp(self.epsilons) * (1 - chance)  # of the event's complement
        return float(max(0.0, below.max(), above.max()))


def f_one_run_p_value(curve: TradeOff, planted: int, guesses: int, correct: int) -> float:
    """Bounds the probability of at least ``correct`` correct guesses (Mahloujifar, Melis, Chaudhuri 2024).

    Each of m = ``planted`` coins is fair, the attacker guesses n = ``guesses`` of them, and C guesses are correct. Let
    T_j = P[C >= j]. Flipping coin i alone turns the event "guess i is correct and C >= j" into "guess i is wrong and
    C >= j - 1", so f-differential privacy relates their probabilities. Their means over the coins are:

        r_j = E[C 1{C >= j}] / m = (j T_j + sum_{i>j} T_i) / m,
        h_{j-1} = E[(n - C) 1{C >= j-1}] / m = ((n - j + 1) T_{j-1} - sum_{i>=j} T_i) / m,

    and, because f is convex, ``h_{j-1} >= least(r_j)``. So ``T_{j-1} >= (m least(r_j) + sum_{i>=j} T_i) /
    (n - j + 1)``. The right side increases in every T_i. So T_c = tau, with 0 above c, gives the smallest possible
    T_{c-1}, ..., T_0 by recursion; a tau that leads to T_0 > 1 is impossible.

    Raises:
        ValueError: the numbers contradict each other.
    """
    if not 0 <= correct <= guesses <= planted:
        raise ValueError(f"correct <= guesses <= planted must hold, got {correct}, {guesses} and {planted}")

    def possible(tau: float) -> bool:
        tail, above = tau, 0.0  # T_j, and the sum of T_i for i > j
        for j in range(correct, 0, -1):
            least = curve.least(min(1.0, (j * tail + above) / planted))
            above += tail
            tail = max(tail, (planted * least + above) / (guesses - j + 1))
            if tail > 1:
                return False
        return True

    if possible(1.0):
        return 1.0
    low, high = np.log(_LEAST_P_VALUE), 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if possible(float(np.exp(middle))) else (low, middle)
    return float(np.exp(high))
