"""Implements the accounting of PMixED as published (Flemings, Razaviyayn, Annavaram 2024).

It serves reproduction and comparison; nothing here is certified. The proof of Theorem 5.1 needs the mollifier's bound
at every order, but Algorithm 1 enforces it at one order only.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import NDArray

from privmix.privacy.events import Divergences, Orders, real_orders

# The orders to try if the paper's order leaves nothing of the budget.
_ORDERS = range(2, 65)


def query_loss(order: float, drawn: int, beta: float) -> float:
    """Returns the Rényi loss of a query to ``drawn`` parts, each within beta times the order of p0 (Theorem 5.1)."""
    if drawn <= 1:
        return beta * order
    exponent = (order - 1) * 4 * beta * order
    return float(scipy.special.logsumexp([0.0, exponent], b=[drawn - 1, 1]) - math.log(drawn)) / (order - 1)


def subsampled_loss(order: int, q: float, drawn: int, beta: float) -> float:
    """Returns the loss of a query to a Poisson subsample at an integer order >= 2 (Theorem C.4; Steinke 2022)."""
    if order < 2 or order != int(order):
        raise ValueError(f"order must be an integer of at least 2, got {order}")
    weights = log_binomial(order, q)
    losses = [(k - 1) * query_loss(k, drawn, beta) for k in range(2, order + 1)]
    return float(scipy.special.logsumexp(weights + np.array([0.0, 0.0, *losses]))) / (order - 1)


def total_loss(order: float, epsilon: float, delta: float) -> float:
    """Returns the Rényi loss at ``order`` that converts to (epsilon, delta) (inverse of Theorem C.3).

    Raises:
        ValueError: no loss is small enough. The message names an order that leaves a loss.
    """
    if (loss := _left(order, epsilon, delta)) > 0:
        return loss
    best = preferred_order(2, epsilon, delta)
    fix = f"order {best} leaves most" if _left(best, epsilon, delta) > 0 else "raise epsilon or delta"
    raise ValueError(f"epsilon {epsilon} at delta {delta:g} leaves nothing to spend at order {order:g}; {fix}")


def preferred_order(order: int, epsilon: float, delta: float) -> int:
    """Returns ``order`` if it leaves a budget to spend; otherwise the order that leaves most, relative to the order."""
    if _left(order, epsilon, delta) > 0:
        return order
    return max(_ORDERS, key=lambda each: _left(each, epsilon, delta) / each)


def _left(order: float, epsilon: float, delta: float) -> float:
    """Returns what (epsilon, delta) leaves to spend at an order; at most 0 if it leaves nothing."""
    from dp_accounting.rdp import compute_epsilon  # slow to import

    # The conversion adds a constant to any loss that is not close to 0.
    probe = 64.0
    return epsilon - float(compute_epsilon([order], [probe], delta)[0] - probe)


@lru_cache(maxsize=4096)
def largest_beta(order: int, q: float, drawn: int, loss: float) -> float:
    """Returns the largest beta for which a query to ``drawn`` parts costs at most ``loss`` at ``order``."""

    def excess(beta: float) -> float:
        return subsampled_loss(order, q, drawn, beta) - loss

    above = 1.0
    while excess(above) < 0:
        above *= 2
    return float(scipy.optimize.brentq(excess, 0.0, above, xtol=1e-15))


def log_binomial(trials: int, q: float) -> NDArray[np.float64]:
    """Returns log P[Binomial(trials, q) = m] for m = 0 ... trials.

    It sums the logs of quotients of coefficients, because differences of log-gamma lose digits for many trials.
    """
    m = np.arange(trials + 1, dtype=np.float64)
    quotients = np.log((trials + 1 - m[1:]) / m[1:])
    coefficients = np.concatenate([[0.0], np.cumsum(quotients)])
    return np.asarray(coefficients + scipy.special.xlogy(m, q) + scipy.special.xlog1py(trials - m, -q))


def removal_then_addition(rdp: Callable[[Orders], Divergences], orders: Orders) -> Divergences:
    """Bounds the Rényi divergence for one part replaced by that for one part added or removed.

    It applies the weak triangle inequality (Mironov 2017, Corollary 4) through the ensemble without the part: at order
    a, the sum of (a - 1/2)/(a - 1) D_2a and D_(2a-1). See also SubMix, Theorem C.1 (Ginart et al. 2022).
    """
    orders = real_orders(orders)
    return np.asarray((orders - 0.5) / (orders - 1) * rdp(2 * orders) + rdp(2 * orders - 1))
