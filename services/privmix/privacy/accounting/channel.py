"""Computes the worst pair of PMixED with the ratio mollifier, when one part's model is replaced (README, Theorem 1).

Draws are secret, so the distribution of a token given the history is ``w p0 + (1-w) (1/N) sum_i r_i``, where
``w = (1-q)^N``. Let a be the mean of the other parts' ratios to p0, and let b and b' be the ratios of the part before
and after. All three lie in [L, H] and have mean one under p0, and

    P/p0 = w + (1-w) ((N-1) a + b) / N,    Q/p0 the same with b'.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import NDArray

from privmix.privacy.accounting.dominating_pair import DominatingPair


@dataclass(frozen=True)
class WorstCaseRatios:
    """Describes the mass of the worst case.

    Attributes:
        mass: p0's mass on the tokens that one version of the part favours, 1 / (H + 1). The other version favours
            tokens of the same mass.
        low, high: P/p0 on tokens that the part does not favour, or favours, if the other parts do not favour them.
        low_shared, high_shared: the same if the other parts favour the token too.
        moved: high - low and high_shared - low_shared, with the digits that these differences may lack.
    """

    mass: float
    low: float
    high: float
    low_shared: float
    high_shared: float
    moved: float

    @classmethod
    def of(cls, parts: int, q: float, radius: float) -> "WorstCaseRatios":
        least, most = np.exp(-radius), np.exp(radius)
        public, private = draw_chances(parts, q)

        def value(others: float, own: float) -> float:
            return float(public + private * ((parts - 1) * others + own) / parts)

        return cls(
            mass=float(scipy.special.expit(-radius)),
            low=value(least, least),
            high=value(least, most),
            low_shared=value(most, least),
            high_shared=value(most, most),
            moved=float(private * 2 * np.sinh(radius) / parts),
        )

    def hockey_stick(self, epsilon: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the largest hockey-stick divergence at each epsilon >= 0, in either direction."""
        return np.asarray(self.mass * np.maximum(0.0, self.moved - np.expm1(epsilon) * self.low))

    @property
    def largest_loss(self) -> float:
        """The maximum of log P/Q."""
        return float(np.log1p(self.moved / self.low))


def draw_chances(parts: int, q: float) -> tuple[float, float]:
    """Returns the probabilities that no part is drawn, and that one or more are.

    Each has its own digits: a part that is drawn with less than 2^-53 is drawn, and costs something.
    """
    if q == 1:
        return 0.0, 1.0
    log_none = parts * math.log1p(-q)
    return math.exp(log_none), -math.expm1(log_none)


@lru_cache(maxsize=64)
def worst_channel(parts: int, q: float, radius: float) -> DominatingPair:
    """Returns the pair with the largest Rényi divergence at every order, when one of ``parts`` parts is replaced.

    Every f-divergence is largest if b and b' equal H on disjoint sets A and B of tokens, and a equals H elsewhere. If
    there is too little room elsewhere (H < 2), the rest of a's mass lies on B, or on A for the other direction.
    """
    corners = WorstCaseRatios.of(parts, q, radius)
    shared = max(0.0, 3 * corners.mass - 1)
    lost, lost_shared = np.log1p(corners.moved / np.array([corners.low, corners.low_shared]))
    outcomes = np.array(  # mass under p0, Q/p0, and log P/Q
        [
            (corners.mass, corners.low, lost),
            (corners.mass - shared, corners.high, -lost),
            (shared, corners.high_shared, -lost_shared),
        ]
    )
    mass, after, log_ratio = outcomes[outcomes[:, 0] > 0].T
    masses = mass * after
    with np.errstate(divide="ignore"):
        log_q = np.log(np.append(masses, max(0.0, 1 - masses.sum())))
    return DominatingPair(log_q, np.append(log_ratio, 0.0))
