"""Bounds tokens whose distribution each part tilts, and whose cost each part's account pays (README, Theorem 4).

The token's distribution is ``p0 (1 + (1/N) sum_i w_i)``. The tilt w_i of part i has mean zero under p0, values in
[-L, U], and the variance V_i. Replacing a part changes the distribution by at most

    chi2(P||Q) <= (sqrt V + sqrt V')^2 / (N^2 (1 - L)),    P / Q - 1 <= B = (U + L) / (N (1 - L)).

An account limits the sum of ``V / (N^2 (1 - L))`` over all tokens. So the sum of the chi-square divergences is at most
four times its size, on every history.
"""

import math
from functools import lru_cache

import numpy as np

from privmix.privacy import accounting
from privmix.privacy.events import Divergences, Event, Orders, real_orders

Before = tuple[tuple[Event, int], ...]

# More than the float64 error of `moment_factor` for every ratio that is accepted.
_ROUNDING = 1e-6
_LEAST_RATIO, _MAX_RATIO = 1e-6, 4.0
# The ratio at which the order is chosen: about 0 for every order up to 257, beyond which an order is chosen again.
_SMALL_RATIO, _SMALL_ORDER = 1e-3, 257
# The best order times the ratio: at least, and over the root of what a token may charge. A larger ratio costs more in
# the bound than wider tilts gain, and tilts are the wider the more a token may charge (tests/benchmarks/README.md).
_LEAST_BEND, _BEND = 0.75, 320


def check_ratio(ratio: float) -> None:
    """Raises ValueError, which names ``ratio``, unless `moment_factor` resolves it."""
    if not _LEAST_RATIO <= ratio <= _MAX_RATIO:
        raise ValueError(f"ratio must be from {_LEAST_RATIO:g} to {_MAX_RATIO:g}, got {ratio}")


def moment_factor(orders: Orders, ratio: float) -> Divergences:
    """Returns g with ``D_a(P||Q) <= g chi2(P||Q)`` at each order, if P / Q - 1 is at most B = ``ratio``.

    For a >= 2, Taylor's theorem for t^a at t = 1 yields ``E_Q (P/Q)^a - 1 <= chi2 ((1+B)^a - 1 - a B) / B^2``, which is
    divided by a - 1. At lower orders, the divergence is at most that of order 2. As B goes to 0, g goes to a / 2.
    """
    a = np.maximum(real_orders(orders), 2.0)
    with np.errstate(over="ignore"):  # infinity bounds what is beyond float64
        excess = np.expm1(a * np.log1p(ratio)) - a * ratio
        return np.asarray(excess / ((a - 1) * ratio**2) * (1 + _ROUNDING))


def account_rdp(orders: Orders, size: float, ratio: float) -> Divergences:
    """Returns a bound of the Rényi divergence of all tokens that accounts of this size pay for.

    Args:
        size: what the sum of ``V / (N^2 (1 - L))`` of each part never exceeds.
        ratio: what P / Q - 1 never exceeds.
    """
    return np.asarray(4 * size * moment_factor(orders, ratio))


@lru_cache(maxsize=64)
def largest_account(epsilon: float, delta: float, tokens: int, before: Before = ()) -> tuple[float, float]:
    """Returns the size of the accounts that (epsilon, delta) allows, and the ratio that they assume.

    The conversion takes the best Rényi order: the account holds at every order at once. The ratio does not depend on
    the number of parts, so that accounts stay the same when it changes.

    Args:
        tokens: the number of tokens over which accounts should last.
        before: what the budget pays besides, such as a private base: events and their counts.

    Raises:
        ValueError: epsilon is too small.
    """
    size, best = _largest_size(epsilon, delta, _SMALL_RATIO, before)
    if best > _SMALL_ORDER:
        size, best = _largest_size(epsilon, delta, _LEAST_RATIO, before)
    bend = max(_LEAST_BEND, _BEND * math.sqrt(size / tokens))
    ratio = float(np.clip(bend / best, _LEAST_RATIO, _MAX_RATIO))
    return _largest_size(epsilon, delta, ratio, before)[0], ratio


def _largest_size(epsilon: float, delta: float, ratio: float, before: Before) -> tuple[float, float]:
    """Returns the largest size and its order. At one order, epsilon is a constant plus the divergence.

    At large orders, the constant is that of a small divergence: beside a large one, float64 would lose it.
    """
    orders, divergences = accounting.ORDERS, account_rdp(accounting.ORDERS, 1.0, ratio)
    finite = np.isfinite(divergences)
    orders, divergences = orders[finite], divergences[finite]
    constants = np.array(
        [
            accounting.epsilon(np.array([loss]), delta, [single]).epsilon - loss
            for single, loss in zip(orders, np.where(orders <= _SMALL_ORDER, divergences, 1.0), strict=True)
        ]
    )
    sizes = (epsilon - constants - accounting.rdp(dict(before), orders)) / divergences
    best = int(sizes.argmax())
    if not sizes[best] > 0:
        raise ValueError(f"epsilon {accounting.stated(epsilon)} at delta {delta:g} is too small for any account")
    return float(sizes[best]) * (1 - 1e-9), float(orders[best])
