"""Mechanisms of bounded range: log P/Q lies in an interval of length eta, wherever that begins (Durfee & Rogers 2019).

The exponential mechanism is one. README, Theorem 2.
"""

import numpy as np
from numpy.typing import NDArray

from services.privacy.events import Divergences, Orders, real_orders

Reals = NDArray[np.float64]

# What float64 may lose of the log of a moment.
ROUNDING = 2.0**-49


def bounded_range_rdp(orders: Orders, eta: float) -> Divergences:
    """The largest Rényi divergence at each order, exactly; both directions have the same range and so the same value.

    Of all t = P / Q with mean 1 under Q and log t in an interval of length eta, E_Q t^a is largest where t takes the
    ends e^-s and e^(eta - s) alone. With x = e^s it is ((x - 1) e^(a eta) + e^eta - x) x^-a / (e^eta - 1), which is
    largest at x = a / (a - 1) (1 - e^((1 - a) eta)) / (1 - e^(-a eta)).
    """
    a = real_orders(orders)
    s = np.log(a / (a - 1)) + np.log(-np.expm1((1 - a) * eta)) - np.log(-np.expm1(-a * eta))
    s = np.clip(s, 0.0, eta)
    with np.errstate(divide="ignore"):  # an end that has no mass
        high = np.log(np.expm1(s)) + a * (eta - s)
        low = s + np.log(np.expm1(eta - s)) - a * s
    moment = np.logaddexp(high, low) - np.log(np.expm1(eta))
    # The Rényi divergence never exceeds the largest privacy loss.
    return np.asarray(np.minimum((np.maximum(moment, 0.0) + ROUNDING) / (a - 1), eta))


def hockey_stick(epsilon: Reals, eta: float, drawn: float = 1.0) -> Reals:
    """Upper bound on the hockey-stick divergence at each epsilon >= 0, of a part drawn with probability g = ``drawn``.

    With K = e^eta and z = 1 + (e^epsilon - 1) / g, advanced joint convexity (Balle, Barthe, Gaboardi 2018) leaves g
    times the largest divergence of bounded range, sup E max(0, t - z) = (sqrt K - sqrt z)^2 / (K - 1) for z in [1, K]
    (Dong, Durfee, Rogers 2020). It is exact for g = 1.
    """
    z = 1 + np.expm1(epsilon) / drawn
    root = np.sqrt(np.minimum(z, np.exp(eta)))
    return np.asarray(drawn * (np.exp(eta / 2) - root) ** 2 / np.expm1(eta))
