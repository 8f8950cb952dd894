"""Bounds mechanisms of bounded range: log P/Q lies in some interval of length eta (Durfee & Rogers 2019).

The exponential mechanism has bounded range. README, Theorem 2.
"""

import numpy as np
from numpy.typing import NDArray

from services.privacy.events import Divergences, Orders, real_orders

Reals = NDArray[np.float64]

# The largest float64 error of the log of a moment.
ROUNDING = 2.0**-49


def bounded_range_rdp(orders: Orders, eta: float) -> Divergences:
    """Returns the exact largest Rényi divergence at each order. It is the same in both directions.

    Among all t = P / Q with mean 1 under Q and log t in an interval of length eta, E_Q t^a is largest when t takes only
    the values e^-s and e^(eta - s). With x = e^s it is ((x - 1) e^(a eta) + e^eta - x) x^-a / (e^eta - 1), which is
    largest at x = a / (a - 1) (1 - e^((1 - a) eta)) / (1 - e^(-a eta)).
    """
    a = real_orders(orders)
    s = np.log(a / (a - 1)) + np.log(-np.expm1((1 - a) * eta)) - np.log(-np.expm1(-a * eta))
    s = np.clip(s, 0.0, eta)
    with np.errstate(divide="ignore"):  # an end of the interval may have no mass
        high = np.log(np.expm1(s)) + a * (eta - s)
        low = s + np.log(np.expm1(eta - s)) - a * s
    moment = np.logaddexp(high, low) - np.log(np.expm1(eta))
    # The Rényi divergence never exceeds the largest privacy loss.
    return np.asarray(np.minimum((np.maximum(moment, 0.0) + ROUNDING) / (a - 1), eta))


def hockey_stick(epsilon: Reals, eta: float, drawn: float = 1.0) -> Reals:
    """Bounds the hockey-stick divergence at each epsilon >= 0 for a part that is drawn with probability g = ``drawn``.

    With K = e^eta and z = 1 + (e^epsilon - 1) / g, advanced joint convexity (Balle, Barthe, Gaboardi 2018) yields g
    times the largest divergence of bounded range, sup E max(0, t - z) = (sqrt K - sqrt z)^2 / (K - 1) for z in [1, K]
    (Dong, Durfee, Rogers 2020). The bound is exact for g = 1.
    """
    z = 1 + np.expm1(epsilon) / drawn
    root = np.sqrt(np.minimum(z, np.exp(eta)))
    return np.asarray(drawn * (np.exp(eta / 2) - root) ** 2 / np.expm1(eta))
