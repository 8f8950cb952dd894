"""Implements subsample-and-aggregate with Laplace noise (Nissim, Raskhodnikova, Smith 2007).

The parts are disjoint subsamples of the corpus. The protocol adds up their distributions over the candidates, which
depend on the public model alone, and adds Laplace noise. The token is sampled in proportion to the positive noisy sums,
or from the public model if none is positive. If a part is replaced, the increases of the sums total at most 1, and so
do the decreases.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from privmix.foundation.lazily import torch
from privmix.privacy.events import (
    PLD_INTERVAL,
    Accountant,
    Divergences,
    Event,
    Guarantee,
    Orders,
    check_parts,
    real_orders,
)
from privmix.privacy.mollifiers.candidates import Candidates, sequences
from privmix.privacy.protocol import Answers, Protocol, Release
from privmix.privacy.sampling.categorical import TOTAL
from privmix.privacy.sampling.noise import discrete_laplace
from privmix.privacy.settings import Settings

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from torch import Tensor

# A probability of 1 in units of the grid for noise. The event depends on it, so it must never change.
UNIT = 2**20
# The smallest and the largest noise scale to consider.
_SCALES = (0.05, 1e6)


@dataclass(frozen=True)
class SubsampleAggregateEvent(Event):
    """Describes one token.

    Attributes:
        parts: the number of summed parts.
        scale: the scale of the discrete Laplace noise on the grid of 1 / `UNIT`; a part's probabilities sum to 1.
    """

    kind: ClassVar[str] = "subsample-aggregate"
    parts: int
    scale: float

    def __post_init__(self) -> None:
        check_parts(self.parts)
        if not 0.0 < self.scale < np.inf:
            raise ValueError(f"scale must be a finite number above 0, got {self.scale}")

    def rdp(self, orders: Orders) -> Divergences:
        """Returns exactly twice the discrete Laplace distribution's divergence for a shift d of one coordinate.

        With t the scale in units, r = e^(-1/t) and s = r^(2a - 1), the geometric sums give

        (a - 1) D = log( ((1 - r s) e^((a-1) d/t) + (r - s) e^(-a d/t)) / ((1 + r) (1 - s)) ).

        Both weights are positive and sum to 1, so D is convex in d and 0 at 0. Thus increases that total at most 1 cost
        most if they are in one coordinate, and so do decreases.
        """
        a = real_orders(orders)
        step, shift = 1 / (self.scale * UNIT), 1 / self.scale
        towards = np.expm1(-2 * a * step) / ((1 + np.exp(-step)) * np.expm1(-(2 * a - 1) * step))
        # Near 0 the terms of first order cancel, so compute the difference from 1 separately.
        with np.errstate(over="ignore"):
            excess = towards * np.expm1((a - 1) * shift) + (1 - towards) * np.expm1(-a * shift)
        small = (a - 1) * shift < 1
        large = np.logaddexp(np.log(towards) + (a - 1) * shift, np.log1p(-towards) - a * shift)
        return np.asarray(2 * np.where(small, np.log1p(np.where(small, excess, 0.0)), large) / (a - 1))

    def pld(self, interval: float = PLD_INTERVAL) -> PrivacyLossDistribution:
        """Returns the distribution of pure DP for increases and decreases, which slightly overestimates the loss."""
        from dp_accounting.pld import privacy_loss_distribution  # slow to import
        from dp_accounting.pld.common import DifferentialPrivacyParameters

        pure = DifferentialPrivacyParameters(1 / self.scale, 0.0)
        return privacy_loss_distribution.from_privacy_parameters(pure, interval).self_compose(2)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(status="certified", source="Nissim et al. 2007; worst case of discrete Laplace noise")


@dataclass(frozen=True)
class SubsampleAggregate(Protocol):
    """Implements subsample-and-aggregate.

    Attributes:
        parts: the number of parts. All parts are queried.
        scale: the scale of the noise; a part's probabilities sum to 1.
        candidates: the number of tokens that receive noise.

    Raises:
        ValueError: a field is out of range.
    """

    name: ClassVar[str] = "subsample-aggregate"
    noisy: ClassVar[bool] = True
    order = None
    parts: int
    scale: float
    candidates: int = 100

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise ValueError(f"candidates must be at least 1, got {self.candidates}")
        if self.event.scale > _SCALES[1]:
            raise ValueError(f"scale must be at most {_SCALES[1]:g}, got {self.scale:g}")

    def distribution(self, answers: Answers) -> Release:
        candidates = Candidates.of(answers.public, self.candidates)
        sums = summed(answers, candidates)
        noisy = discrete_laplace(sums.cpu().numpy(), self.scale * UNIT)
        # The clip never matters in practice, but no draw of the noise may let a total exceed 2**62.
        bounded = torch.from_numpy(noisy.clip(0, TOTAL // (2 * sums.shape[1]))).to(sums.device)
        left = torch.where(candidates.kept, bounded, 0)
        weights = torch.zeros(answers.public.shape, dtype=torch.int64, device=sums.device)
        weights.scatter_(1, candidates.tokens, left)
        empty = left.sum(dim=1) == 0
        weights[empty] = (answers.public[empty].double() * (TOTAL / 2)).long()
        return Release(weights)

    @cached_property
    def event(self) -> SubsampleAggregateEvent:
        return SubsampleAggregateEvent(self.parts, self.scale)


class SubsampleAggregateSettings(Settings):
    """The parts' distributions over a few tokens, added up under Laplace noise."""

    mechanism: ClassVar[type[Protocol]] = SubsampleAggregate
    choose: ClassVar[str] = "a baseline; many parts and few tokens"
    derived: ClassVar[str | None] = "scale"

    protocol: Literal["subsample-aggregate"] = "subsample-aggregate"
    scale: float | None = Field(None, gt=0, description="the scale of the noise, in parts")
    candidates: int = Field(
        SubsampleAggregate.candidates, ge=1, description="the number of most likely public tokens that receive noise"
    )

    def plan(self, parts: int, kept: Accountant | None = None) -> SubsampleAggregate:
        scale = self.scale or self.smallest(lambda scale: SubsampleAggregateEvent(parts, scale), _SCALES, kept)
        return SubsampleAggregate(parts, scale, self.candidates)


def summed(answers: Answers, candidates: Candidates) -> Tensor:
    """Sums each sequence's rows on the grid, int64 [S, k]. A row is non-negative and totals at most `UNIT`."""
    rows = candidates.probabilities(answers)
    rows /= rows.sum(dim=1, keepdim=True).clamp_(min=1.0)
    sums = torch.zeros(candidates.tokens.shape, dtype=torch.int64, device=rows.device)
    return sums.index_add_(0, sequences(answers), (rows * UNIT).long())
