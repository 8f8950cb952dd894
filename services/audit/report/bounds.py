"""From what an attack got right to a lower bound on epsilon that holds with a stated confidence."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import bisect
from scipy.stats import beta, binom

Reals = NDArray[np.float64]

# Epsilons are looked for below this.
_LARGEST = 200.0
# Epsilons at which a trade-off curve is known, and the least p-value that is told from 0.
_CURVE_POINTS, _LEAST_P_VALUE = 400, 1e-30


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


@dataclass(frozen=True, eq=False)
class TradeOff:
    """A trade-off function f (Dong, Roth, Su 2022), by the hockey-stick divergences that it allows.

    ``P[E] <= e^epsilon Q[E] + delta(epsilon)`` for every event E and both orders of P and Q. Epsilons between those
    given are left out, which allows more and so proves less.

    Attributes:
        epsilons: float64 [K], at least 0.
        deltas: float64 [K].
    """

    epsilons: Reals
    deltas: Reals

    @classmethod
    def of_pld(cls, pld: PrivacyLossDistribution) -> Self:
        """The curve of a dominating pair, up to the epsilon at which next to nothing is left."""
        epsilons = np.linspace(0.0, min(_LARGEST, max(1e-3, pld.get_epsilon_for_delta(1e-12))), _CURVE_POINTS)
        return cls(epsilons, np.asarray(pld.get_delta_for_epsilon(epsilons)))

    def least(self, chance: float) -> float:
        """The least chance in one world of an event whose chance in the other is this: inverse of ``1 - f``."""
        below = (chance - self.deltas) * np.exp(-self.epsilons)
        above = 1 - self.deltas - np.exp(self.epsilons) * (1 - chance)  # of the event's complement
        return float(max(0.0, below.max(), above.max()))


def f_one_run_p_value(curve: TradeOff, planted: int, guesses: int, correct: int) -> float:
    """Chance that f-differential privacy lets so many guesses be right (Mahloujifar, Melis, Chaudhuri 2024).

    Each of m = ``planted`` coins is fair, n = ``guesses`` of them are guessed, and C is how many of those are right.
    Let T_j = P[C >= j]. "The guess of coin i is right and C >= j" becomes "the guess of coin i is wrong and C >= j - 1"
    when coin i alone is turned over, so that f-differential privacy relates their chances. Their means over the coins:

        r_j = E[C 1{C >= j}] / m = (j T_j + sum_{i>j} T_i) / m,
        h_{j-1} = E[(n - C) 1{C >= j-1}] / m = ((n - j + 1) T_{j-1} - sum_{i>=j} T_i) / m,

    and, f being convex, ``h_{j-1} >= least(r_j)``. So ``T_{j-1} >= (m least(r_j) + sum_{i>=j} T_i) / (n - j + 1)``. The
    right side grows with every T_i. So from T_c = tau, and 0 above it, the smallest possible T follow downwards; a tau
    that leads to T_0 > 1 is impossible.

    Raises:
        ValueError: the numbers contradict each other.
    """
    if not 0 <= correct <= guesses <= planted:
        raise ValueError(f"correct <= guesses <= planted must hold, got {correct}, {guesses} and {planted}")

    def possible(tau: float) -> bool:
        tail, above = tau, 0.0  # T_j, and the sum of those above it
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
