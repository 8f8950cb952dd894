"""The exponential mechanism over clipped log-ratios, of which sampling a token is the finite case.

For each token every part is drawn with probability q, and the token is sampled from

    p proportional to p0 exp( (1 / (q N)) sum_{i drawn} clip(log(p_i / p0), -c, c) ),

the public model where no part was drawn (McSherry & Talwar 2007). N and q are those of the deployment, however many
were drawn. The exponent is clipped to [-c, c] as a whole, too: that moves no two exponents apart, and matters only
where more than q N parts were drawn.

One part multiplies the distribution by e^x / z, with x in a range of width eta = 2 c / (q N) (Durfee & Rogers 2019).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, Literal

import numpy as np
import torch
from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray
from pydantic import Field
from scipy.optimize import brentq
from torch import Tensor

from services.privacy import planning
from services.privacy.blocks import rows_at_once
from services.privacy.candidates import sequences
from services.privacy.channel import real_orders
from services.privacy.events import (
    PLD_INTERVAL,
    Divergences,
    Event,
    Guarantee,
    Orders,
    check_parts,
)
from services.privacy.protocol import Answers, Protocol, Release
from services.privacy.randomness import poisson_subsample
from services.privacy.replacement import removal_then_addition
from services.privacy.sampling import quantise
from services.privacy.settings import Settings

Reals = NDArray[np.float64]

# Cells of the search for the worst case, and how often those that may hold it are divided again. The bound found
# exceeds the largest value by a share of about 4 / _CELLS**2.
_CELLS = 256
_STAGES = 4
# What float64 may lose of the log of a moment.
_ROUNDING = 2.0**-49
# The largest share of a radius that rounding may take.
_LARGEST_LOSS = 0.1


@dataclass(frozen=True)
class ExponentialEvent(Event):
    """One token. ``parts`` is N of the exponent, which counts the part that is or is not there; ``radius`` is c.

    Given the other parts drawn, the outputs with and without the part are P = (1 - q + q t) Q, where t has mean 1 under
    Q and lies in [e^-s, e^(eta - s)] for some s in [0, eta].
    """

    kind: ClassVar[str] = "exponential"
    parts: int
    q: float
    radius: float

    def __post_init__(self) -> None:
        check_parts(self.parts)
        if not (self.q <= 1.0 and self.q * self.parts >= 1.0 - 1e-9):
            raise ValueError(f"q must lie between 1 / parts = {1 / self.parts:.4g} and 1, got {self.q}")
        if not 0.0 < self.radius < np.inf:
            raise ValueError(f"radius must be a finite number above 0, got {self.radius}")

    @property
    def range(self) -> float:
        """eta: the width of the range of what one part drawn adds to the exponent."""
        return 2 * self.radius / (self.q * self.parts)

    def rdp(self, orders: Orders) -> Divergences:
        """The worst case exactly, not an amplification theorem.

        For a convex f, E_Q f(t) is largest, among the t of mean 1 in an interval, where t takes the two ends of it
        only. What is left is the largest moment over s.
        """
        orders = real_orders(orders)
        forward, backward = (_largest_log_moment(b, self.q, self.range) for b in (orders, 1 - orders))
        return np.asarray((np.maximum(0.0, np.maximum(forward, backward)) + _ROUNDING) / (orders - 1))

    def user_rdp(self, orders: Orders) -> Divergences:
        return removal_then_addition(self.rdp, orders)

    def pld(self, interval: float = PLD_INTERVAL) -> PrivacyLossDistribution:
        """From the largest hockey-stick divergence at each epsilon, over s: with K = e^eta and z >= 0,

        sup E_Q max(0, t - z) = (sqrt K - sqrt z)^2 / (K - 1) for z in [1/K, K].

        They come from different s, so the pair that has them all is worse than any one: where the Rényi bound gives
        the smaller epsilon, that one holds too.
        """
        eta, q = self.range, self.q

        def removed(epsilon: Reals) -> Reals:
            z = 1 + np.expm1(epsilon) / q
            root = np.sqrt(np.clip(z, np.exp(-eta), np.exp(eta)))
            return np.where(z < np.exp(-eta), q * (1 - z), q * (np.exp(eta / 2) - root) ** 2 / np.expm1(eta))

        def added(epsilon: Reals) -> Reals:
            z = 1 + np.expm1(-epsilon) / q
            root = np.sqrt(np.clip(z, np.exp(-eta), np.exp(eta)))
            inside = np.exp(epsilon) * q * (np.exp(eta / 2) * root - 1) ** 2 / np.expm1(eta)
            return np.where(z > np.exp(eta), -np.expm1(epsilon), inside)

        least, most = np.log1p(q * np.expm1(-eta)), np.log1p(q * np.expm1(eta))
        return PrivacyLossDistribution(
            _connected(removed, least, most, interval), _connected(added, -most, -least, interval)
        )

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(status="certified", source="McSherry & Talwar 2007; bounded range: Durfee & Rogers 2019")


@dataclass(frozen=True)
class Exponential(Protocol):
    """The exponential mechanism.

    Attributes:
        parts: N, how many parts the ensemble has.
        q: the probability with which each is drawn for a token.
        radius: c, where log-ratios are clipped, in nats.

    Raises:
        ValueError: a field is out of range.
    """

    name: ClassVar[str] = "exponential"
    order = None
    parts: int
    q: float
    radius: float

    def __post_init__(self) -> None:
        event = self.event
        low, high = radii(event.parts, event.q)
        if not low <= self.radius <= high:
            raise ValueError(f"radius must be from {low:.3g} to {high:.3g} with these parts, got {self.radius:g}")

    @property
    def rows(self) -> int | None:
        return self.parts if self.q == 1 else None

    def draw(self) -> tuple[int, ...]:
        return poisson_subsample(self.parts, self.q)

    def release(self, answers: Answers) -> Release:
        clipped = self.radius - slack(self.parts, self.q, self.radius)
        exponents = _summed(answers, clipped).div_(self.q * self.parts).clamp_(-clipped, clipped)
        return Release(quantise(exponents.exp_().mul_(answers.public)))

    @cached_property
    def event(self) -> ExponentialEvent:
        return ExponentialEvent(self.parts, self.q, self.radius)


class ExponentialSettings(Settings):
    """Poisson-subsampled parts, whose clipped log-ratios to the public model are added up in the exponent."""

    asks: ClassVar[str] = "the whole-part model of each part drawn"
    choose: ClassVar[str] = "a certified bound for a known number of tokens, where many parts agree on unlikely tokens"
    derived: ClassVar[str | None] = "radius"

    protocol: Literal["exponential"] = "exponential"
    q: float = Field(
        1.0, gt=0, le=1, description="the probability with which a part is drawn for a token; at least 1 / parts"
    )
    radius: float | None = Field(None, gt=0, description="c: where log-ratios to the public model are clipped, in nats")

    def plan(self, parts: int, order: float | None = None) -> Exponential:
        if self.radius is not None:
            return Exponential(parts, self.q, self.radius)
        radius = planning.largest(
            lambda radius: ExponentialEvent(parts, self.q, radius),
            self.tokens,
            self.budget,
            self.delta,
            radii(parts, self.q),
        )
        return Exponential(parts, self.q, radius)


def slack(parts: int, q: float, radius: float) -> float:
    """How much smaller than ``radius`` to clip, so that the integer weights, as rounded, keep to the range of it.

    A weight before it is rounded is 2**61 p0 e^x / z >= 2**25 e^(-2c), since x lies in [-c, c] and z is a mean of e^x;
    rounding changes it by a half at most. The range of the log of a quotient of two weights is that of four roundings,
    2**-24 e^(2c) in all, of which the clip takes q N / 2; doubled for what p0 and z are off by. The second term is
    float64 rounding of a sum of N log-ratios, four times over.
    """
    return q * parts * 2.0**-24 * float(np.exp(2 * radius)) + parts**2 * radius * 2.0**-50


@lru_cache(maxsize=64)
def radii(parts: int, q: float) -> tuple[float, float]:
    """The smallest and the largest radius that can be kept to while little of it is lost to rounding (`slack`)."""

    def left(radius: float) -> float:
        return _LARGEST_LOSS * radius - slack(parts, q, radius)

    if left(0.5) <= 0:
        raise ValueError(f"parts: {q * parts:g} parts drawn for a token are too many for integer weights")
    return brentq(left, 1e-9, 0.5, xtol=1e-12), brentq(left, 0.5, 32.0)


def _summed(answers: Answers, radius: float) -> Tensor:
    """float64 [S, V]: the sum of the clipped log-ratios of each sequence's rows."""
    ratios = answers.ratios
    owners = sequences(answers)
    sums = torch.zeros(answers.public.shape, dtype=torch.float64, device=ratios.device)
    at_once = rows_at_once(ratios)
    for start in range(0, len(ratios), at_once):
        block = slice(start, start + at_once)
        sums.index_add_(0, owners[block], ratios[block].double().log_().clamp_(-radius, radius))
    return sums


def _largest_log_moment(powers: Reals, q: float, eta: float) -> Reals:
    """log of the largest E_Q[(1 - q + q t)^b] for each power b <= 0 or b >= 1, never understated.

    Branch and bound. The t of every s in a cell lie between the least and the largest of the cell, so the two-valued t
    with these values bounds them all; cells below what an edge reaches cannot hold the largest.
    """
    rows, b = np.arange(len(powers)), powers[:, None]
    first, last = np.zeros(len(powers)), np.full(len(powers), eta)
    bound = last
    for _ in range(_STAGES):
        edges = first[:, None] + (last - first)[:, None] * np.linspace(0, 1, _CELLS + 1)
        reached = _log_moment(b, q, edges, eta - edges).max(axis=1)
        bounds = _log_moment(b, q, edges[:, 1:], eta - edges[:, :-1])
        open_cells = bounds >= reached[:, None]
        bound = bounds.max(axis=1)
        first = edges[rows, open_cells.argmax(axis=1)]
        last = edges[rows, _CELLS - open_cells[:, ::-1].argmax(axis=1)]
    return bound


def _log_moment(b: Reals, q: float, below: Reals, above: Reals) -> Reals:
    """log E[(1 - q + q t)^b] for t of mean 1 with the values e^-below and e^above."""
    with np.errstate(divide="ignore"):  # a value that has no mass
        log_high, log_low = np.log(np.expm1(below)), below + np.log(np.expm1(above))
    high, low = b * np.log1p(q * np.expm1(above)), b * np.log1p(q * np.expm1(-below))
    return np.asarray(np.logaddexp(log_high + high, log_low + low) - np.log(np.expm1(below + above)))


def _connected(delta: Callable[[Reals], Reals], least: float, most: float, interval: float) -> object:
    """Pessimistic privacy loss distribution of losses in [least, most] with hockey-stick divergences ``delta``."""
    points = np.arange(math.floor(least / interval), math.ceil(most / interval) + 1)
    losses = np.asarray(points * interval, dtype=np.float64)
    deltas = np.minimum.accumulate(np.clip(delta(losses), 0.0, 1.0))
    return create_pmf_pessimistic_connect_dots(interval, points, deltas)
