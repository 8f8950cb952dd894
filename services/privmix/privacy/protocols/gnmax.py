"""Implements GNMax: the plurality of votes under Gaussian noise (Papernot et al. 2018).

Every part votes for its most likely token among the candidates, which depend on the public model alone. The candidate
with the largest noisy count is released. The noise is discrete Gaussian and exact (`noise`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import scipy
from numpy.typing import NDArray
from pydantic import Field

from privmix.foundation.lazily import torch
from privmix.privacy.accounting import planning
from privmix.privacy.arrays import Integers, Reals
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
from privmix.privacy.sampling.noise import discrete_gaussian
from privmix.privacy.settings import Settings

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from torch import Tensor

# The smallest and the largest noise scale to consider, in votes. At smaller scales, discrete noise is nearly always 0.
SCALES = (0.25, 1e5)
# The number of standard deviations beyond which the mass of a Gaussian is negligible in float64.
_FARTHEST = 10
# The minimum of a probability that is positive but may underflow in float64.
_SMALLEST = 1e-300


@dataclass(frozen=True)
class GNMaxEvent(Event):
    """Describes one token: replacing a part moves its vote, so two counts change by 1, for any votes.

    The dominating pair is that of two independent discrete Gaussians, one shifted up and one down (Canonne, Kamath,
    Steinke 2020).
    """

    kind: ClassVar[str] = "gnmax"
    measured: ClassVar[bool] = True
    parts: int
    sigma: float

    def __post_init__(self) -> None:
        check_parts(self.parts)
        if not 0.0 < self.sigma < np.inf:
            raise ValueError(f"sigma must be a finite number above 0, got {self.sigma}")

    def rdp(self, orders: Orders) -> Divergences:
        return np.asarray(real_orders(orders) / self.sigma**2)

    def pld(self, interval: float = PLD_INTERVAL) -> PrivacyLossDistribution:
        from dp_accounting.pld import privacy_loss_distribution  # slow to import

        return privacy_loss_distribution.from_discrete_gaussian_mechanism(
            self.sigma, sensitivity=1, value_discretization_interval=interval
        ).self_compose(2)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(
            status="certified", source="Papernot et al. 2018; discrete Gaussian noise: Canonne, Kamath, Steinke 2020"
        )


@dataclass(frozen=True)
class GNMax(Protocol):
    """Implements GNMax.

    Attributes:
        parts: the number of parts. All parts vote.
        sigma: the scale of the noise, in votes.
        candidates: the number of tokens that can receive votes.
        order: the Rényi order of the data-dependent losses.

    Raises:
        ValueError: a field is out of range.
    """

    name: ClassVar[str] = "gnmax"
    noisy: ClassVar[bool] = True
    parts: int
    sigma: float
    candidates: int = 100
    order: float = 8.0

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise ValueError(f"candidates must be at least 1, got {self.candidates}")
        if not 1.0 < self.order < np.inf:
            raise ValueError(f"order must be a finite number above 1, got {self.order}")
        if self.event.sigma > SCALES[1]:
            raise ValueError(f"sigma must be at most {SCALES[1]:g} votes, got {self.sigma:g}")

    def distribution(self, answers: Answers) -> Release:
        candidates = Candidates.of(answers.public, self.candidates)
        counts, kept = votes(answers, candidates), candidates.kept.cpu().numpy()
        noisy = np.where(kept, discrete_gaussian(counts, self.sigma), np.iinfo(np.int64).min)
        winners = torch.from_numpy(noisy.argmax(axis=1)[:, None]).to(answers.public.device)
        weights = torch.zeros(answers.public.shape, dtype=torch.int64, device=answers.public.device)
        weights.scatter_(1, candidates.tokens.gather(1, winners), TOTAL // 2)
        return Release(weights, loss(counts, self.sigma, self.order)[:, None])

    def chance_bounds(self, answers: Answers, tokens: Tensor) -> tuple[Reals, Reals]:
        """Returns upper bounds of the tokens' probabilities, 0 for tokens that are not candidates.

        The distribution of a noisy plurality has no closed form. SubMix compares with this bound (Ginart et al. 2022,
        appendix B.4).
        """
        candidates = Candidates.of(answers.public, self.candidates)
        counts, kept = votes(answers, candidates), candidates.kept.cpu().numpy()
        chances = torch.from_numpy(largest_chances(counts, kept, self.sigma)).to(tokens.device)
        true = (candidates.tokens == tokens[:, None]) & candidates.kept
        bounds = np.asarray(torch.where(true, chances, 0.0).sum(dim=1).cpu().numpy())
        return bounds, loss(counts, self.sigma, self.order)[:, None]

    @cached_property
    def event(self) -> GNMaxEvent:
        return GNMaxEvent(self.parts, self.sigma)


class GNMaxSettings(Settings):
    """The plurality of the parts' most likely tokens, under Gaussian noise."""

    mechanism: ClassVar[type[Protocol]] = GNMax
    choose: ClassVar[str] = "a baseline; many parts that mostly agree, and the most likely token alone is wanted"
    derived: ClassVar[str | None] = "sigma"

    protocol: Literal["gnmax"] = "gnmax"
    sigma: float | None = Field(None, gt=0, description="the scale of the noise, in votes")
    candidates: int = Field(
        GNMax.candidates, ge=1, description="the number of most likely public tokens that can receive votes"
    )
    order: int | None = Field(
        None, ge=2, description="the Rényi order of the data-dependent losses; the best for the budget unless given"
    )

    def plan(self, parts: int, kept: Accountant | None = None) -> GNMax:
        sigma = self.sigma or self.smallest(lambda sigma: GNMaxEvent(parts, sigma), SCALES, kept)
        if self.order is not None and kept is not None and kept.order != self.order:
            raise ValueError(f"order must be the ledger's, {kept.order:g}, got {self.order}")
        best = planning.cost(GNMaxEvent(parts, sigma), self.tokens, self.delta, before=self.spent_before).best_order
        return GNMax(parts, sigma, self.candidates, self.order or (best if kept is None else kept.order))


def votes(answers: Answers, candidates: Candidates) -> Integers:
    """Counts the votes for each candidate, int64 [S, k]. A row votes for its most likely candidate."""
    counts = torch.zeros(candidates.tokens.shape, dtype=torch.int64, device=candidates.tokens.device)
    choices = candidates.probabilities(answers).argmax(dim=1)
    counts.index_put_((sequences(answers), choices), torch.ones_like(choices), accumulate=True)
    return np.asarray(counts.cpu().numpy())


def loss(counts: Integers, sigma: float, order: float) -> Reals:
    """Returns the data-dependent Rényi divergence at ``order`` when one vote changes, in both directions, float64 [S].

    It applies Theorem 6 with Proposition 7 (Papernot et al. 2018) for eps(mu) = mu / sigma^2, with the mu1 and mu2 that
    minimise its two terms. The theorem bounds D(M(votes) || M(neighbour)) by the probability that the plurality does
    not win. This function uses the largest such probability of the votes [S, k] and all their neighbours, whose margins
    are smaller by at most 2. So the theorem also holds at the neighbour, which yields the other direction. If its
    condition fails or the bound is larger, the data-independent bound applies.
    """
    independent = order / sigma**2
    margins = np.partition(counts, -1, axis=1)[:, -1:] - counts
    winner = counts.argmax(axis=1)[:, None]
    misses = _exceeds(margins - 2, sigma, _reach(counts))
    np.put_along_axis(misses, winner, 0.0, axis=1)
    q = np.clip(misses.sum(axis=1), _SMALLEST, 1.0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_inverse = -np.log(q)
        mu2 = sigma * np.sqrt(log_inverse)
        mu1 = np.maximum(order, 1 + mu2)
        eps1, eps2 = mu1 / sigma**2, mu2 / sigma**2
        holds = -log_inverse <= (mu2 - 1) * eps2 - mu2 * (np.log(mu1 / (mu1 - 1)) + np.log(mu2 / (mu2 - 1)))
        log_a = np.log1p(-q) - np.log(-np.expm1((mu2 - 1) / mu2 * (eps2 - log_inverse)))
        log_b = eps1 + log_inverse / (mu1 - 1)
        moment = np.logaddexp(np.log1p(-q) + (order - 1) * log_a, -log_inverse + (order - 1) * log_b)
        dependent = np.where(holds & (mu2 > 1), moment / (order - 1), np.inf)
    return np.asarray(np.fmin(np.maximum(dependent, 0.0), independent))


def largest_chances(counts: Integers, kept: NDArray[np.bool_], sigma: float) -> Reals:
    """Bounds each kept candidate's probability to win with votes [S, k], float64 [S, k].

    It must reach the largest other count, and it must win against all that have at least as many votes as it has: by
    symmetry one of them wins, and ties go to it.
    """
    reach, counts = _reach(counts), np.where(kept, counts, -1)
    if counts.shape[1] == 1:
        return np.ones(counts.shape)
    largest = np.partition(counts, (-2, -1), axis=1)[:, -2:]
    winner = np.arange(counts.shape[1]) == counts.argmax(axis=1)[:, None]
    others = np.where(winner, largest[:, :1], largest[:, 1:])
    reaches = np.where(others < 0, 1.0, _exceeds(others - counts, sigma, reach))
    rivals, place = np.unique(scipy.stats.rankdata(-counts, method="max", axis=1), return_inverse=True)
    return np.asarray(np.minimum(reaches, _wins_among(rivals, sigma)[place].reshape(counts.shape)))


def _wins_among(rivals: Reals, sigma: float) -> Reals:
    """Returns P[Z_1 >= Z_2, ..., Z_m] for each number m of independent discrete Gaussians."""
    width = math.ceil(_FARTHEST * sigma)
    masses = np.exp(-(np.arange(-width, width + 1) ** 2) / (2 * sigma**2))
    masses /= masses.sum()
    below = np.minimum(masses.cumsum(), 1.0)
    return np.array([float(masses @ below ** (count - 1)) for count in rivals])


def _reach(counts: Integers) -> int:
    """Returns a margin that no votes exceed. Every part votes, so it does not depend on what they say."""
    return int(counts.sum(axis=1).max(initial=0)) + 2


def _exceeds(margins: Integers, sigma: float, reach: int) -> Reals:
    """Returns P[Z - Z' >= margin] for each margin up to `reach`, with independent discrete Gaussians Z and Z'."""
    tail = _tail(reach + 1, sigma)
    above = tail[np.abs(margins)]
    return np.where(margins >= 0, above, 1 - tail[np.abs(margins) + 1])


@lru_cache(maxsize=8)
def _tail(reach: int, sigma: float) -> Reals:
    """Returns P[Z - Z' >= d] for d = 0 … reach. It is kept, so `reach` must not tell what the parts say.

    Completing the square in sum_z exp(-(z^2 + (z + d)^2) / (2 sigma^2)) yields exp(-d^2 / (4 sigma^2)) times a sum that
    depends only on whether d is even.
    """
    width = _FARTHEST * sigma
    z = np.arange(-math.ceil(width), math.ceil(width) + 1)
    sums = np.exp(-(z**2) / sigma**2).sum(), np.exp(-((z + 0.5) ** 2) / sigma**2).sum()
    d = np.arange(reach + math.ceil(2 * width) + 1)
    masses = np.exp(-(d**2) / (4 * sigma**2)) * np.where(d % 2, sums[1], sums[0])
    masses /= np.exp(-(z**2) / (2 * sigma**2)).sum() ** 2
    tail = masses[::-1].cumsum()[::-1]
    tail.setflags(write=False)
    return np.asarray(tail)
