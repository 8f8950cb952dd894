"""Represents dominating pairs of distributions, as finite tables or by their hockey-stick divergences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy
from numpy.typing import NDArray

from privmix.privacy.arrays import Reals
from privmix.privacy.events import Divergences, Orders, real_orders

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

# Exponents below this do not overflow float64.
_MAX_EXPONENT = 500.0
# Exponents below this have a series of three terms, to 2^-45.
_TINY = 1e-4


@dataclass(frozen=True)
class DominatingPair:
    """Holds a pair of distributions (P, Q) over finitely many outcomes.

    Attributes:
        log_q: log of the mass of each outcome under Q, float64 [K].
        log_ratio: log(P / Q) of each outcome, float64 [K].
    """

    log_q: NDArray[np.float64]
    log_ratio: NDArray[np.float64]

    def rdp(self, orders: Orders) -> Divergences:
        """Returns the larger of D_a(P||Q) and D_a(Q||P) at each order."""
        orders = real_orders(orders)
        forward, backward = self._log_moment(orders), self._log_moment(1 - orders)
        return np.asarray(np.maximum(0.0, np.maximum(forward, backward)) / (orders - 1))

    def _log_moment(self, powers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns log E_Q[t^b] for t = P/Q and each power b.

        Since ``E t = 1``, ``E t^b = 1 + E[(t^b - 1) - b (t - 1)]``. Its terms are non-negative, so a moment near 1
        loses no digits.
        """
        b = powers[:, None]
        exponents = b * self.log_ratio
        with np.errstate(over="ignore", invalid="ignore"):
            excess = excess_power(b, self.log_ratio) @ np.exp(self.log_q)
        overflows = exponents.max(axis=1) > _MAX_EXPONENT
        moments = np.log1p(np.where(overflows, 0.0, excess))
        if overflows.any():  # slow, and rare
            moments[overflows] = scipy.special.logsumexp(self.log_q + exponents[overflows], axis=1)
        return np.asarray(moments)


def excess_power(b: Reals, log_t: Reals) -> Reals:
    """Returns ``(t^b - 1) - b (t - 1)`` for each element, by its series where both terms share most of their digits."""
    exponents = b * log_t
    tiny = np.maximum(np.abs(exponents), np.abs(log_t)) < _TINY
    series = b * (b - 1) / 2 * log_t**2 * (1 + (b + 1) / 3 * log_t + (b**2 + b + 1) / 12 * log_t**2)
    return np.where(tiny, series, np.expm1(exponents) - b * np.expm1(log_t))


def symmetric_pld(delta: Callable[[Reals], Reals], largest: float, interval: float) -> PrivacyLossDistribution:
    """Returns the privacy loss distribution of the pair with hockey-stick divergences ``delta`` in both directions.

    Such a pair exists for every ``delta`` that is convex in e^epsilon (Zhu, Dong, Wang 2022, Proposition 8), and it
    also dominates under composition (their Theorem 10).

    Args:
        delta: the hockey-stick divergence at each epsilon >= 0. Symmetry determines it below 0:
            ``delta(-e) = 1 - exp(-e) + exp(-e) delta(e)``.
        largest: the largest loss with mass.
        interval: the grid interval of losses. Chords between grid points overstate the divergence (Doroshenko, Ghazi,
            Kamath, Kumar, Manurangsi 2022).
    """
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap  # slow to import
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    most = max(1, math.ceil(largest / interval))
    above = np.minimum.accumulate(np.clip(delta(np.arange(most + 1, dtype=np.float64) * interval), 0.0, 1.0))
    below = np.arange(-most, 0) * interval
    deltas = np.concatenate([-np.expm1(below) + np.exp(below) * above[:0:-1], above])
    return PrivacyLossDistribution(create_pmf_pessimistic_connect_dots_fixed_gap(interval, -most, most, deltas))
