"""Implements the exponential mechanism over clipped log-ratios (McSherry & Talwar 2007).

For each token, m of the N parts are drawn without replacement, and the token is sampled from

    p proportional to p0 exp( (1/m) sum_{i drawn} clip(log(p_i / p0) + t_i, -c, c) )

The constant t_i depends only on p_i and p0, so it has no privacy cost. With the optimal constant,
``t = log sum_x p0 clip(e^t p_i / p0, e^-c, e^c)``, each factor is the projection of p_i, in KL, onto the distributions
whose ratios to p0 lie within a factor e^(2c) of each other. `_centres` takes two steps towards it.

Replacing a drawn part multiplies p by e^x / z, where x has a range of width 4c/m (bounded range: Durfee & Rogers 2019).
A part is drawn with probability m/N.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from privmix.foundation.lazily import torch
from privmix.privacy import reduction
from privmix.privacy.accounting.bounded_range import bounded_range_rdp, hockey_stick, sampled_rdp
from privmix.privacy.accounting.dominating_pair import symmetric_pld
from privmix.privacy.events import (
    PLD_INTERVAL,
    Accountant,
    Divergences,
    Event,
    Guarantee,
    Orders,
    check_parts,
)
from privmix.privacy.mollifiers.mixture import usable_radii
from privmix.privacy.mollifiers.rows import centred_steps, clipped_means, summed_steps
from privmix.privacy.protocol import Answers, Partial, PartLogits, PartRows, Protocol, Release
from privmix.privacy.sampling.categorical import quantise
from privmix.privacy.sampling.randomness import fixed_size_subsample
from privmix.privacy.settings import Settings

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from torch import Tensor

# Of the step to a row's centre: where clipping leaves all tokens as they are, any centre is as good.
_MAX_SLOPE = 0.95
# The largest sum of clipped log-ratios, in steps: of a narrow type where a clip then has at least this many steps, and
# of a wide one otherwise. Rounding then moves no exponent by more than c / 500.
_NARROW, _LEAST_STEPS = 2**15 - 1, 255
_WIDE_BITS = 30


@dataclass(frozen=True)
class FixedSizeExponentialEvent(Event):
    """One token of a mechanism of bounded range behind a draw; see README, Theorems 2 and 3.

    Given the other parts drawn, the laws before and after the replacement are P = (1 - g) A + g B and
    Q = (1 - g) A + g B', where g is the chance that the part is drawn, and the log-ratios of any two of A, B and B' lie
    in intervals of width `range`.

    Attributes:
        parts: N.
        sample: m, the parts drawn for a token, without replacement.
        radius: c, in nats.
    """

    kind: ClassVar[str] = "exponential-fixed-size"
    parts: int
    sample: int
    radius: float

    def __post_init__(self) -> None:
        check_parts(self.parts)
        if not isinstance(self.sample, int) or not 1 <= self.sample <= self.parts:
            raise ValueError(f"sample must be an integer from 1 to the {self.parts} parts, got {self.sample}")
        if not 0.0 < self.radius < np.inf:
            raise ValueError(f"radius must be a finite number above 0, got {self.radius}")

    @property
    def drawn(self) -> float:
        """g: the chance that the part is drawn."""
        return self.sample / self.parts

    @property
    def range(self) -> float:
        """eta: the width of the range of log(B / B')."""
        return 4 * self.radius / self.sample

    def rdp(self, orders: Orders) -> Divergences:
        """Exact for bounded range where every part is drawn, else the bound of Theorem 3."""
        if self.drawn == 1:
            return bounded_range_rdp(orders, self.range)
        return sampled_rdp(orders, self.range, self.drawn)

    def pld(self, interval: float = PLD_INTERVAL) -> PrivacyLossDistribution:
        most = np.log1p(self.drawn * np.expm1(self.range))
        return symmetric_pld(lambda epsilon: hockey_stick(epsilon, self.range, self.drawn), most, interval)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(status="certified", source="McSherry & Talwar 2007; bounded range: Durfee & Rogers 2019")


@dataclass(frozen=True)
class Exponential(Protocol):
    """The exponential mechanism.

    Attributes:
        parts: N, how many parts the ensemble has.
        sample: m, how many of them are drawn for a token.
        radius: c, where log-ratios are clipped, in nats.

    Raises:
        ValueError: a field is out of range.
    """

    name: ClassVar[str] = "exponential"
    order = None
    parts: int
    sample: int
    radius: float

    def __post_init__(self) -> None:
        low, high = radii(self.event.sample)
        if not low <= self.radius <= high:
            raise ValueError(f"radius must be from {low} to {high} with these parts, got {self.radius}")

    @property
    def rows(self) -> int:
        return self.sample

    def draw(self) -> tuple[int, ...]:
        return fixed_size_subsample(self.parts, self.sample)

    def distribution(self, answers: Answers) -> Release:
        """Raises ValueError where a sequence does not have ``sample`` rows: its cost would be another."""
        if any(len(models) != self.sample for models in answers.models):
            raise ValueError(f"models must name {self.sample} parts for each sequence")
        return reduction.distribution(self, answers, self.sample)

    @property
    def additive(self) -> bool:
        return True

    def partial(self, rows: PartRows) -> Partial:
        """Sums the centred and clipped log-ratios in whole steps, int32 [S, V]; exact, however groups divide parts."""
        centres = _centres(rows.ratios, rows.public, self._clip)
        return Partial(summed_steps(rows.ratios, centres, rows.drawn, 1 / self._step, self._steps))

    def fused(self, rows: PartLogits) -> Partial | None:
        """As `partial`; each row's score is clamped as an integer, so no cost depends on rounding (`rows_triton`)."""
        sums = centred_steps(
            rows.log_p,
            rows.public,
            rows.scales,
            rows.drawn,
            self._clip,
            _MAX_SLOPE,
            1 / self._step,
            self._steps,
        )
        return None if sums is None else Partial(sums)

    def narrowed(self, sums: Tensor) -> Tensor:
        """Returns the sums as int16 where those of all ``sample`` rows fit, which halves what leaves a shard."""
        return sums.to(torch.int16) if self._is_narrow else sums

    def added(self, partials: Sequence[Tensor]) -> Tensor:
        """Adds up in float64, exactly. Raises ValueError for sums that ``sample`` rows cannot have."""
        sums = torch.zeros(partials[0].shape, dtype=torch.float64, device=partials[0].device)
        for partial in partials:
            sums += partial
        most = self.sample * self._steps
        if bool((sums.abs() > most).any()):
            raise ValueError(f"sums must be at most {most} steps, which is what {self.sample} parts add")
        return sums

    def combine(self, public: Tensor, sums: Tensor, charges: Tensor | None = None) -> Release:
        exponents = sums.double().mul(self._step / self.sample)
        return Release(quantise(exponents.exp_().mul_(public)))

    def draws(self, kinds: Sequence[int]) -> Mapping[tuple[int, ...], float]:
        """Every set of `sample` parts with the same chance."""
        counts = product(*(range(min(count, self.sample) + 1) for count in kinds))
        return {
            drawn: math.prod(map(math.comb, kinds, drawn)) / math.comb(self.parts, self.sample)
            for drawn in counts
            if sum(drawn) == self.sample
        }

    @cached_property
    def event(self) -> FixedSizeExponentialEvent:
        return FixedSizeExponentialEvent(self.parts, self.sample, self.radius)

    @property
    def _clip(self) -> float:
        """The radius that remains after the mechanism makes room for rounding, in nats."""
        return self.radius - slack(self.sample, self.radius)

    @property
    def _is_narrow(self) -> bool:
        return self.sample * _LEAST_STEPS <= _NARROW

    @cached_property
    def _steps(self) -> int:
        """The steps from 0 to the clip, whatever groups divide the parts; float32 holds the number exactly."""
        return _NARROW // self.sample if self._is_narrow else 1 << _WIDE_BITS - math.ceil(math.log2(self.sample))

    @property
    def _step(self) -> float:
        """The unit of a summed log-ratio, in nats."""
        return self._clip / self._steps


class ExponentialSettings(Settings):
    """A fixed number of parts, whose clipped log-ratios to the public model are averaged in the exponent."""

    mechanism: ClassVar[type[Protocol]] = Exponential
    choose: ClassVar[str] = "a certified bound for a known number of tokens, where many parts agree on unlikely tokens"
    derived: ClassVar[str | None] = "radius"

    protocol: Literal["exponential"] = "exponential"
    sample: int | None = Field(
        None, ge=1, description="how many parts are drawn for a token, without replacement; all unless given"
    )
    radius: float | None = Field(None, gt=0, description="c: where log-ratios to the public model are clipped, in nats")

    def plan(self, parts: int, kept: Accountant | None = None) -> Exponential:
        sample = parts if self.sample is None else self.sample
        if self.radius is not None:
            return Exponential(parts, sample, self.radius)
        radius = self.largest(lambda radius: FixedSizeExponentialEvent(parts, sample, radius), radii(sample), kept)
        return Exponential(parts, sample, radius)


def slack(sample: int, radius: float) -> float:
    """Returns by how much the clip must be smaller than ``radius``, so that rounded weights keep the bounded range.

    An unrounded weight is 2**61 p0 e^x / z >= 2**25 e^(-2c), because x lies in [-c, c] and z is a mean of e^x. Rounding
    changes it by at most 1/2. The range of the log of a quotient of two weights contains four roundings, together
    2**-24 e^(2c); the clip absorbs m / 4 of it, times four for the errors of p0 and z. A sum of clipped log-ratios is a
    whole number of steps and has no error; the float64 error of the exponent and its power, below 2**-49 (1 + c), is
    covered by the same factor.
    """
    return sample * 2.0**-24 * float(np.exp(2 * radius))


@lru_cache(maxsize=64)
def radii(sample: int) -> tuple[float, float]:
    """The smallest and the largest radius that can be kept to while little of it is lost to rounding (`slack`)."""
    try:
        return usable_radii(lambda radius: slack(sample, radius), 1e-9, 0.5)
    except ValueError as error:
        raise ValueError(f"sample: {sample} parts for a token are too many for integer weights") from error


def _centres(ratios: Tensor, public: Tensor, radius: float) -> Tensor:
    """Computes the constant t of each row of [s, n, V], float32 [s, n]: README, Theorem 2.

    Takes two steps of ``t <- log sum_x p0 clip(e^t u, L, H)`` from t = 0 and extrapolates them as a geometric series
    (Aitken). What a token costs does not depend on how near this comes: each row is clipped afterwards.
    """
    first = _log_means(ratios, public, radius, torch.zeros(ratios.shape[:2], device=ratios.device))
    second = _log_means(ratios, public, radius, first)
    shrinks_by = ((second - first) / torch.where(first == 0, 1.0, first)).clamp_(0, _MAX_SLOPE)
    return (first / (1 - shrinks_by)).clamp_(-radius, radius)


def _log_means(ratios: Tensor, public: Tensor, radius: float, shifts: Tensor) -> Tensor:
    """Computes ``log sum_x p0 clip(e^t u, L, H)`` of each row with its own shift t, float32 [s, n]."""
    low, high = (-radius - shifts).exp_(), (radius - shifts).exp_()
    return clipped_means(ratios, public, low, high).log_() + shifts
