"""The dominating pair of a ratio-bounded, Poisson-subsampled mixture (one part added or removed).

The worst case of a query is a finite channel: m other parts are drawn, and the token falls on one of the corners of
the square that holds the two likelihood ratios to the public model, that of the others' mean and that of the part in
question. For every convex f the f-divergence of the mechanism is at most that of the channel.

When a part is replaced by another instead, the worst case at each order is a linear program over the eight corners of a
cube: the others' mean and the two versions of the part.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, xlog1py, xlogy

from services.privacy.events import Divergences, Orders


@dataclass(frozen=True)
class Channel:
    """A finite pair of distributions (P, Q).

    Attributes:
        log_q: log of the mass of each outcome under Q, float64 [K].
        log_ratio: log(P / Q) of each outcome, float64 [K].
    """

    log_q: NDArray[np.float64]
    log_ratio: NDArray[np.float64]

    def rdp(self, orders: Orders) -> Divergences:
        """The larger of D_a(P||Q) and D_a(Q||P) at each order."""
        orders = real_orders(orders)
        a = orders[:, None]
        forward = logsumexp(self.log_q + a * self.log_ratio, axis=1)
        backward = logsumexp(self.log_q + (1 - a) * self.log_ratio, axis=1)
        return np.asarray(np.maximum(0.0, np.maximum(forward, backward)) / (orders - 1))


def real_orders(orders: Orders) -> NDArray[np.float64]:
    """The orders as a float64 vector.

    Raises:
        ValueError: an order is not a finite number above 1.
    """
    vector = np.atleast_1d(np.asarray(orders, dtype=np.float64))
    valid = np.isfinite(vector) & (vector > 1)
    if not valid.all():
        raise ValueError(f"Rényi orders must be finite and above 1, got {vector[~valid][0]}")
    return vector


def log_binomial(trials: int, q: float) -> NDArray[np.float64]:
    """log P[Binomial(trials, q) = m] for m = 0 … trials.

    The coefficients are summed as logs of their quotients: differences of log-gamma lose digits for many trials.
    """
    m = np.arange(trials + 1, dtype=np.float64)
    quotients = np.log((trials + 1 - m[1:]) / m[1:])
    coefficients = np.concatenate([[0.0], np.cumsum(quotients)])
    return np.asarray(coefficients + xlogy(m, q) + xlog1py(trials - m, -q))


@lru_cache(maxsize=64)
def ratio_channel(parts: int, q: float, radius: float) -> Channel:
    """The channel of one token, with ``parts`` counting the part in question.

    Rows, for m other parts drawn: m = 0 has the part's own ratio H or L against the public model; m >= 1 the corners
    (others, own) = (H, L), (L, H) and (L, L), of which the last tells nothing.
    """
    high, low = np.exp(radius), np.exp(-radius)
    log_pi = -np.logaddexp(radius, 0.0)
    log_m = log_binomial(parts - 1, q)
    alone, others = log_m[:1], log_m[1:]
    share = q / (np.arange(1, parts) + 1.0)
    log_q = [alone + log_pi, alone + log_pi + radius]
    log_ratio = [np.log1p([q * (high - 1)]), np.log1p([q * (low - 1)])]
    log_q += [others + log_pi + radius, others + log_pi - radius, others + np.log(np.tanh(radius / 2)) - radius]
    log_ratio += [np.log1p(share * (low / high - 1)), np.log1p(share * (high / low - 1)), np.zeros(parts - 1)]
    return Channel(np.concatenate(log_q), np.concatenate(log_ratio))


def replacement_rdp(parts: int, q: float, radius: float, orders: Orders) -> Divergences:
    """D_a of one token when one of ``parts`` parts is replaced by any other; equal in both directions.

    Given m other parts drawn, P and Q are linear in the corner and their divergence's integrand is convex, so the worst
    distribution over the corners, each coordinate of mean 1 under p0, is a vertex of a polytope. The polytope is the
    same for every m and order: its vertices are listed once.
    """
    a = real_orders(orders)[:, None]
    log_m = log_binomial(parts - 1, q)
    bounds = (np.exp(-radius), np.exp(radius))
    alone = np.array([(1.0, *corner) for corner in product(bounds, repeat=2)])
    exponents = [log_m[0] + _worst_corner_mixture(alone, q, a)]
    if parts > 1:
        corners = np.array(list(product(bounds, repeat=3)))
        shares = q / (np.arange(1, parts) + 1.0)
        exponents += [log + _worst_corner_mixture(corners, s, a) for log, s in zip(log_m[1:], shares, strict=True)]
    return np.asarray(np.maximum(0.0, logsumexp(np.stack(exponents), axis=0)) / (a[:, 0] - 1))


def _worst_corner_mixture(corners: NDArray[np.float64], share: float, a: NDArray[np.float64]) -> NDArray[np.float64]:
    """log of the largest mean of P^a Q^(1-a) over distributions on the corners whose coordinates all have mean 1."""
    others, new, old = corners.T
    log_p, log_q = np.log(others + share * (new - others)), np.log(others + share * (old - others))
    integrand = a * log_p + (1 - a) * log_q
    largest = integrand.max(axis=1, keepdims=True)
    means = np.exp(integrand - largest) @ _vertices(tuple(map(tuple, corners.tolist()))).T
    return np.asarray(np.log(means.max(axis=1)) + largest[:, 0])


@lru_cache(maxsize=64)
def _vertices(corners: tuple[tuple[float, ...], ...]) -> NDArray[np.float64]:
    """Vertices [W, K] of the distributions over K corners under which every coordinate has mean 1: basic solutions."""
    coordinates = np.array(corners).T
    constraints = np.vstack([np.ones(len(corners)), coordinates[np.ptp(coordinates, axis=1) > 0]])
    vertices = []
    for basis in combinations(range(len(corners)), len(constraints)):
        square = constraints[:, basis]
        if abs(np.linalg.det(square)) < 1e-12 * np.abs(square).max() ** len(basis):
            continue
        masses = np.linalg.solve(square, np.ones(len(basis)))
        if masses.min() > -1e-12:
            vertex = np.zeros(len(corners))
            vertex[list(basis)] = np.maximum(masses, 0.0)
            vertices.append(vertex)
    return np.array(vertices)
