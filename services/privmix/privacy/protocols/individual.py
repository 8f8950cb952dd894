"""Implements individual budgets: each part pays from its own account for what it changes, and not for the worst case.

All N parts answer every token. Part i turns its distribution into a tilt of the public model's, a function of the
vocabulary with mean zero under p0 and values in [-L, U]:

    w_i = s_i (b_i - E_p0[b_i]),    b_i = clip(p_i / p0, e_i - L / l_i, e_i + min(U / l_i, cap)),

and the token is sampled from ``p0 (1 + (1/N) sum_i w_i)``. The part's account is charged ``E_p0[w_i^2] / (N^2 (1-L))``.
The strength l_i follows from what the part's account allows for the token and from the variance of its ratios, e_i is
near the mean of b_i, and s_i is l_i or less, so that a tilt never costs more than its account allows. A part whose
account is empty is silent, so no token is ever refused: the ensemble fades into the public model. Accounts of single
parts are the idea of Feldman and Zrnic (2021); README, Theorem 4, has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from privmix.foundation.lazily import torch
from privmix.privacy import accounting, reduction
from privmix.privacy.accounting.tilts import account_rdp, check_ratio, largest_account
from privmix.privacy.events import SEPARATE_PARTS, Accountant, Divergences, Event, Guarantee, Orders
from privmix.privacy.mollifiers.blocks import totals
from privmix.privacy.mollifiers.rows import clipped_means, clipped_moments, clipped_sums
from privmix.privacy.protocol import Answers, Partial, PartRows, Protocol, Release
from privmix.privacy.sampling.categorical import TOTAL
from privmix.privacy.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

# The smallest L that rounding (`ROUNDING_MARGIN`) leaves whole.
_LEAST_LOWER = 1e-3

WHOLE = 2**40
"""The grains of a full account. Charges are whole grains, rounded up, so that ledgers add them exactly."""

HEADROOM = 8
"""The most that one token may charge, as a multiple of what tokens should charge on average."""

# What the bounds of the token's distribution lose to rounding, and the room for rounding in a charge (README).
ROUNDING_MARGIN = 2.0**-20
_RELATIVE_ROOM = 1 + 2.0**-19
_VARIANCE_ROOM = 2.0**-30

_LEAST = 1e-12

_SCALE = TOTAL / 2

# The defaults of the settings, and the largest strength that is of use (tests/benchmarks/README.md).
_CAP = 100.0
_STRONGEST = 1.5
_LOWER_OF_RADIUS = 0.36
_LOWERS = (0.05, 0.6)


@dataclass(frozen=True)
class IndividualEvent(Event):
    """Describes all tokens that one set of accounts pays for. It does not depend on the number of parts.

    Attributes:
        size: of an account: the most that the sum of ``V / (N^2 (1 - L))`` of a part can be.
        ratio: the most that replacing a part can change the probability of a token, relatively.
    """

    kind: ClassVar[str] = "individual"
    once: ClassVar[bool] = True
    accounts: ClassVar[bool] = True
    size: float
    ratio: float

    def __post_init__(self) -> None:
        if not 0.0 < self.size < np.inf:
            raise ValueError(f"size must be a finite number above 0, got {self.size}")
        check_ratio(self.ratio)

    def rdp(self, orders: Orders) -> Divergences:
        """Returns the divergence of all tokens together, whatever their number."""
        return account_rdp(orders, self.size, self.ratio)

    @property
    def token_epsilon(self) -> float:
        return math.log1p(self.ratio)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(
            status="certified",
            source="individual Rényi filter (Feldman & Zrnic 2021) over tilts of bounded variance",
            assumes=(
                *SEPARATE_PARTS,
                "the accounts of the parts, and how many are empty, are seen by the operator alone",
            ),
            seen="any number of released tokens",
        )


@dataclass(frozen=True)
class Individual(Protocol):
    """Individual budgets.

    Attributes:
        parts: N, the number of parts. All answer every token.
        lower: L: tilts are at least -L, so that a token's probability never falls below (1 - L) p0.
        upper: U, the largest value of a tilt.
        cap: the largest distance of a clipped ratio from the mean of the clipped ratios.
        size: of a part's account (`IndividualEvent`).
        ratio: the most that replacing a part can change a token's probability, relatively.
        tokens: the number of tokens over which the parts plan to spend their accounts.

    Raises:
        ValueError: a field is out of range.
    """

    name: ClassVar[str] = "individual"
    order = None
    parts: int
    lower: float
    upper: float
    cap: float
    size: float
    ratio: float
    tokens: int

    def __post_init__(self) -> None:
        if not isinstance(self.parts, int) or self.parts < 2:
            raise ValueError(f"parts must be an integer of at least 2 for individual budgets, got {self.parts}")
        if not _LEAST_LOWER <= self.lower < 1:
            raise ValueError(f"lower must be from {_LEAST_LOWER:g} to below 1, got {self.lower}")
        if not 1 <= self.cap < np.inf:
            raise ValueError(f"cap must be a finite number of at least 1, got {self.cap}")
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")
        widest = _widest(self.parts, self.lower, self.ratio)
        if not 0 < self.upper <= widest:
            raise ValueError(f"upper must be above 0 and at most {widest:.3g} with these parts, got {self.upper:g}")

    def distribution(self, answers: Answers) -> Release:
        """Computes the weights, and what each token charges to each account (`Release.charges`).

        Without `Answers.allowances`, each token may take an equal fraction of a full account.

        Raises:
            ValueError: a sequence does not have the rows of all parts: its cost would be another.
        """
        everyone = self.draw()
        if any(models != everyone for models in answers.models):
            raise ValueError(f"models must name all {self.parts} parts for each sequence, in order")
        allowances = answers.allowances
        if allowances is None:
            allowances = torch.full((len(answers.public), self.models), WHOLE // self.tokens, dtype=torch.int64)
        return reduction.distribution(
            self, replace(answers, allowances=allowances.to(answers.public.device)), self.models
        )

    @property
    def additive(self) -> bool:
        return True

    def partial(self, rows: PartRows) -> Partial:
        """Computes the sum of some parts' tilts, float64 [S, V], and what each of them is charged.

        Each part's tilt and charge depend on its own row and allowance alone. All parts count as drawn.
        """
        assert rows.allowances is not None
        return Partial(*self.tilts(rows.ratios, rows.public, rows.allowances))

    def tilts(self, ratios: Tensor, public: Tensor, allowances: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the sum of some parts' tilts, and what each part is charged.

        The same operations run for every part, silent or not, so that their number tells nothing.

        Args:
            ratios: float32 [S, n, V], the likelihood ratios of n of the parts.
            public: float32 [S, V], p0.
            allowances: int64 [S, n], the most that the token may charge to each account, in grains.

        Returns:
            float64 [S, V], the sum of the n tilts; int64 [S, n], charges in grains, none above its allowance.
        """
        p0 = public.double()
        p0 /= totals(p0)
        affordable = ((allowances.double() * self._grain).sqrt_() / _RELATIVE_ROOM - self._slack).clamp_(min=0)
        low = torch.zeros_like(affordable, dtype=torch.float32)
        centres, variances = _moments(ratios, p0, low, low + (1 + self.cap))
        strengths = _strength(affordable, variances)
        low, high = self._clip(centres, strengths)
        low, high = self._clip(clipped_means(ratios, p0.float(), low, high).double(), strengths)
        means, variances = _moments(ratios, p0, low, high)
        scales = torch.minimum(strengths, _strength(affordable, variances))
        scales = torch.minimum(scales, self.lower / (means - low).clamp(min=_LEAST))
        scales = torch.minimum(scales, self.upper / (high - means).clamp(min=_LEAST))
        norms = scales * variances.sqrt() * _RELATIVE_ROOM + self._slack
        charges = (norms.square() * (_RELATIVE_ROOM / self._grain)).ceil_()
        speaks = (scales > 0) & (charges <= allowances)
        scales = torch.where(speaks, scales, 0.0)
        sums = clipped_sums(ratios, low, high, scales)
        sums -= (scales * means).sum(dim=1, keepdim=True)
        return sums, torch.where(speaks, charges, 0.0).long()

    def _clip(self, centres: Tensor, strengths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where ratios around these centres are clipped, float32: tilts of these strengths are in [-L, U]."""
        strengths = strengths.clamp(min=_LEAST)
        above = (self.upper / strengths).clamp_(max=self.cap)
        return (centres - self.lower / strengths).float(), (centres + above).float()

    def combine(self, public: Tensor, sums: Tensor, charges: Tensor | None = None) -> Release:
        weights = (sums / self.parts).add_(1).mul_(public).mul_(_SCALE).round_().long()
        return Release(weights, charges=charges)

    @property
    def radius(self) -> float:
        """The strength of tokens of the average cost, comparable with the exponential mechanism's clip."""
        return self.parts * math.sqrt(self.size / self.tokens)

    @cached_property
    def event(self) -> IndividualEvent:
        return IndividualEvent(self.size, self.ratio)

    @cached_property
    def _grain(self) -> float:
        """The variance of a tilt that charges one grain."""
        return self.size * self.parts**2 * (1 - self.lower - ROUNDING_MARGIN) / WHOLE

    @cached_property
    def _slack(self) -> float:
        """What rounding adds to the norm of a tilt that is not zero, at most (README, Theorem 4)."""
        return self.parts * 2.0**-30 + self.parts**2 * (1 + self.upper) * 2.0**-49 + (1 + self.upper) * 2.0**-28


class IndividualSettings(Settings):
    """All parts, each with an account of its own that pays for what the part changes; no token is ever refused."""

    mechanism: ClassVar[type[Protocol]] = Individual
    choose: ClassVar[str] = "the most gain for a budget, if all rows are affordable: answers fade, and never end"

    protocol: Literal["individual"] = "individual"
    tokens: int = Field(1024, gt=0, description="the tokens over which parts plan to spend their accounts; no limit")
    lower: float | None = Field(
        None,
        ge=_LEAST_LOWER,
        lt=1,
        description="L: the parts lower no token's probability by more than this fraction; default: from the budget",
    )
    cap: float = Field(_CAP, ge=1, description="the largest ratio p_i / p0, less its mean, that counts")

    def plan(self, parts: int, kept: Accountant | None = None) -> Individual:
        if parts < 2:
            raise ValueError(f"parts must be at least 2 for individual budgets, got {parts}; choose another protocol")
        size, ratio = largest_account(self.budget, self.delta, self.tokens, tuple(self.spent_before.items()))
        lower = min(self._lower(parts, size), _largest_lower(parts, ratio))
        if lower < _LEAST_LOWER:
            raise ValueError(
                f"epsilon {accounting.stated(self.epsilon)} at delta {self.delta:g} is too small for tilts of {parts} "
                "parts; raise it, or train more parts"
            )
        return Individual(parts, lower, _widest(parts, lower, ratio), self.cap, size, ratio, self.tokens)

    def _lower(self, parts: int, size: float) -> float:
        """Returns the L that is set, or one that suits tokens of the average cost."""
        if self.lower is not None:
            return self.lower
        radius = parts * math.sqrt(size / self.tokens)
        return float(np.clip(_LOWER_OF_RADIUS * math.sqrt(radius), *_LOWERS))

    @property
    def horizon(self) -> int:
        return self.tokens

    def details(self, protocol: Protocol) -> Mapping[str, Any]:
        assert isinstance(protocol, Individual)
        return {
            "lower": protocol.lower,
            "upper": protocol.upper,
            "account": protocol.size,
            "radius": protocol.radius,
        }


def _moments(ratios: Tensor, p0: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the means and variances of clipped ratios under p0, float64 [S, n]; variances with room for rounding."""
    means, second = clipped_moments(ratios, p0, low, high)
    return means, (second - means.square() + _VARIANCE_ROOM * second).clamp_(min=0)


def _strength(affordable: Tensor, variances: Tensor) -> Tensor:
    """Returns the strength of tilts of these variances, whose norm is below what is affordable."""
    return (affordable / (1 + variances).sqrt()).clamp_(max=_STRONGEST)


def _widest(parts: int, lower: float, ratio: float) -> float:
    """Returns the largest U with ``(U + L) / (N (1 - L))`` within the ratio, with room for rounding."""
    return parts * (ratio * (1 - lower - ROUNDING_MARGIN) - ROUNDING_MARGIN) - lower


def _largest_lower(parts: int, ratio: float) -> float:
    """Returns the L at which U equals L: no larger one is of use."""
    return parts * (ratio * (1 - ROUNDING_MARGIN) - ROUNDING_MARGIN) / (2 + parts * ratio)
