"""Bounds mechanisms of bounded range: log P/Q lies in some interval of length eta (Durfee & Rogers 2019).

The exponential mechanism has bounded range: README, Theorem 2. Theorem 3 bounds it behind a draw, P = (1-g) A + g B and
Q = (1-g) A + g B', where any two of A, B and B' have bounded range.
"""

import numpy as np

from privmix.privacy.accounting.dominating_pair import excess_power
from privmix.privacy.arrays import Reals
from privmix.privacy.events import Divergences, Orders, real_orders

# The largest float64 error of the log of a moment.
ROUNDING = 2.0**-49
# Of ranges below it, moments near 1 are logs of sums of numbers so small that their own logs are rounded by more.
_TINY = 2.0**-9

# Cells and nodes of the quadrature over a range, the largest order times range that they resolve, and what is added
# for their error, relatively: of two nodes, (order * range / _CELLS)^4 / 4320 at most.
_CELLS, _NODES = 256, 2
_MAX_EXPONENT = 100.0
_QUADRATURE_ERROR = 1e-5


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
    if eta < _TINY:
        near = a * eta < 1
        moment[near] = np.maximum(moment[near], _moment_near_one(a[near], eta, s[near]))
    # The Rényi divergence never exceeds the largest privacy loss.
    return np.asarray(np.minimum((np.maximum(moment, 0.0) + ROUNDING) / (a - 1), eta))


def _moment_near_one(a: Reals, eta: float, s: Reals) -> Reals:
    """Returns log E_Q t^a of the ratio in `bounded_range_rdp`, from ``E t^a - 1``, whose terms are not negative."""
    mass = np.expm1(s) / np.expm1(eta)  # of e^(eta - s): E t = 1
    return np.asarray(np.log1p(mass * excess_power(a, eta - s) + (1 - mass) * excess_power(a, -s)))


def sampled_rdp(orders: Orders, eta: float, drawn: float) -> Divergences:
    """Upper bound on the Rényi divergence at each order, in both directions, behind a draw of chance g = ``drawn``.

    README, Theorem 3. With x = 1 + g (z - 1) and beta = x / z, E_Q (P/Q)^a - 1 is at most a (a-1) g^2 times

        int_1^K x^(a-2) (beta delta_z(B, B') + (1-beta) delta_z(B, A))
            + x^(-a-1) (beta delta_z(B', B) + (1-beta) delta_z(B', A)) dz,    K = e^eta.

    The terms of (B, B'), of (B, A) and of (B', A) are three f-divergences, and each is at most that of a likelihood
    ratio with two values. Never above the divergence of Theorem 2, nor above the largest privacy loss.
    """
    a = real_orders(orders)
    largest_loss = np.log1p(drawn * np.expm1(eta))
    resolved = a * eta <= _MAX_EXPONENT
    log_excess = np.full(a.shape, np.inf)
    log_excess[resolved] = _log_excess_moment(a[resolved], eta, drawn) + _QUADRATURE_ERROR
    moment = np.logaddexp(0.0, log_excess) + ROUNDING
    return np.asarray(np.minimum(np.minimum(moment / (a - 1), largest_loss), bounded_range_rdp(a, eta)))


def _log_excess_moment(a: Reals, eta: float, drawn: float) -> Reals:
    """The log of the bound in `sampled_rdp`; powers are relative to the largest, x^(a-2) at z = K."""
    edges = np.linspace(0.0, eta, _CELLS + 1)  # of log z
    nodes, weights = (each[:, None] for each in np.polynomial.legendre.leggauss(_NODES))
    width = eta / _CELLS
    excess = np.expm1(edges[:-1] + width * (nodes + 1) / 2)  # z - 1, [nodes, cells]: sums over the first axis are fast
    measure = width / 2 * weights * (1 + excess)  # dz
    log_x = np.log1p(drawn * excess)
    both_replaced = measure * np.exp(log_x) / (1 + excess)  # beta dz
    one_replaced = measure * (1 - drawn) * excess / (1 + excess)  # (1 - beta) dz
    order = a[:, None]
    scale = (order - 2) * log_x.flat[-1]
    forward = np.exp((order - 2) * log_x[:, None] - scale)  # [nodes, orders, cells]
    backward = np.exp((-order - 1) * log_x[:, None] - scale)

    def integrals(power: Reals, factor: Reals) -> Reals:
        """[orders, edges]: the integral of power factor max(0, t - z) at t = e^edge."""
        weight = power * factor[:, None]
        masses, moments = weight.sum(axis=0).cumsum(axis=1), (weight * excess[:, None]).sum(axis=0).cumsum(axis=1)
        return np.pad(np.expm1(edges[1:]) * masses - moments, ((0, 0), (1, 0)))

    total = _largest_mean(integrals(forward, both_replaced), integrals(backward, both_replaced), edges)
    for power in (forward, backward):
        one_sided = integrals(power, one_replaced)
        total += _largest_mean(one_sided, np.zeros_like(one_sided), edges)
    with np.errstate(divide="ignore"):  # every part is drawn and eta is tiny
        return np.asarray(np.log(a * (a - 1)) + 2 * np.log(drawn) + scale[:, 0] + np.log(total))


def _largest_mean(above: Reals, below: Reals, edges: Reals) -> Reals:
    """Upper bound on E above(t) + t below(1/t) for t of mean one in an interval [e^-s, e^(eta-s)], over all s.

    The function is convex and 0 at t = 1, so its mean is largest where t takes the ends alone. For s between two edges
    the ends are those of the smallest interval that holds all of them.

    Args:
        above, below: [orders, edges], at t = e^edge, for the tokens with t >= 1 and with t <= 1.
    """
    high, low = np.expm1(edges[:0:-1]), np.expm1(-edges[1:])
    mass = low / (low - high)  # of the high end
    means = mass * above[:, :0:-1] + (1 - mass) * (1 + low) * below[:, 1:]
    return np.asarray(means.max(axis=1))


def hockey_stick(epsilon: Reals, eta: float, drawn: float = 1.0) -> Reals:
    """Bounds the hockey-stick divergence at each epsilon >= 0 for a part that is drawn with probability g = ``drawn``.

    With K = e^eta and z = 1 + (e^epsilon - 1) / g, advanced joint convexity (Balle, Barthe, Gaboardi 2018) yields g
    times the largest divergence of bounded range, sup E max(0, t - z) = (sqrt K - sqrt z)^2 / (K - 1) for z in [1, K]
    (Dong, Durfee, Rogers 2020). Inputs with A = B' attain the bound at each epsilon, but no input at all of them.
    """
    z = 1 + np.expm1(epsilon) / drawn
    root = np.sqrt(np.minimum(z, np.exp(eta)))
    return np.asarray(drawn * (np.exp(eta / 2) - root) ** 2 / np.expm1(eta))
