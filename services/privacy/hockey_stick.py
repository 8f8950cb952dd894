"""Privacy loss distributions from hockey-stick divergences."""

import math
from collections.abc import Callable

import numpy as np
from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray

Reals = NDArray[np.float64]


def symmetric_pld(delta: Callable[[Reals], Reals], largest: float, interval: float) -> PrivacyLossDistribution:
    """The privacy loss distribution of the pair whose hockey-stick divergences are ``delta`` in both directions.

    Such a pair exists for every ``delta`` that is convex in e^epsilon (Zhu, Dong, Wang 2022, Proposition 8), and it
    dominates under composition, too (their Theorem 10).

    Args:
        delta: the hockey-stick divergence at each epsilon >= 0. Below 0 it follows from the symmetry:
            ``delta(-e) = 1 - exp(-e) + exp(-e) delta(e)``.
        largest: the loss above which there is no mass.
        interval: losses are multiples of this; chords between them overstate the divergence (Doroshenko, Ghazi,
            Kamath, Kumar, Manurangsi 2022).
    """
    most = max(1, math.ceil(largest / interval))
    above = np.minimum.accumulate(np.clip(delta(np.arange(most + 1, dtype=np.float64) * interval), 0.0, 1.0))
    below = np.arange(-most, 0) * interval
    deltas = np.concatenate([-np.expm1(below) + np.exp(below) * above[:0:-1], above])
    return PrivacyLossDistribution(create_pmf_pessimistic_connect_dots_fixed_gap(interval, -most, most, deltas))
