"""Implements PMixED, private mixing of ensemble distributions (Flemings, Razaviyayn, Annavaram 2024).

For each token, every part is drawn with probability q. A mollifier moves the distribution of each drawn part towards
the public model's. The token is sampled from their mean, or from the public model if no part was drawn.

There are two mollifiers. ``ratio`` bounds the likelihood ratio to the public model; its cost is exact and certified.
``renyi`` is Algorithm 1 as published.

With ``ratio``, by symmetry, a token has the distribution ``w p0 + (1-w) (1/N) sum_i r_i``, where ``w = (1-q)^N``. So it
suffices to query one part, chosen uniformly, or none with probability w: the distribution is the same, and a token
needs only one row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import scipy
from pydantic import Field

from privmix.foundation.lazily import torch
from privmix.privacy.accounting import published
from privmix.privacy.accounting.channel import WorstCaseRatios, draw_chances, worst_channel
from privmix.privacy.accounting.dominating_pair import symmetric_pld
from privmix.privacy.events import (
    PLD_INTERVAL,
    SEPARATE_PARTS,
    Accountant,
    Divergences,
    Event,
    Guarantee,
    Orders,
    check_parts,
    real_orders,
)
from privmix.privacy.mollifiers import projection, renyi
from privmix.privacy.mollifiers.blocks import scratch
from privmix.privacy.mollifiers.mixture import accepted, integer_weights, scaled, slack, usable_radii
from privmix.privacy.mollifiers.projection import Projection
from privmix.privacy.protocol import Answers, Partial, PartRows, Protocol, Release
from privmix.privacy.sampling.randomness import poisson_subsample, uniform_below
from privmix.privacy.settings import ROUNDING_MARGIN, Settings

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from torch import Tensor

Mollifier = Literal["ratio", "renyi"]


@dataclass(frozen=True)
class RatioEvent(Event):
    """Describes one token under the ratio mollifier.

    Attributes:
        q: the probability with which each part is drawn. Draws are secret. With probability ``(1 - q) ** parts`` no
            part is drawn, and the public model answers.
        radius: c in nats.
    """

    kind: ClassVar[str] = "pmixed-ratio"
    parts: int
    q: float
    radius: float

    def __post_init__(self) -> None:
        _check_draw(self.parts, self.q)
        if not 0.0 < self.radius < np.inf:
            raise ValueError(f"radius must be a finite number above 0, got {self.radius}")

    def rdp(self, orders: Orders) -> Divergences:
        return worst_channel(self.parts, self.q, self.radius).rdp(orders)

    def pld(self, interval: float = PLD_INTERVAL) -> PrivacyLossDistribution:
        corners = WorstCaseRatios.of(self.parts, self.q, self.radius)
        return symmetric_pld(corners.hockey_stick, corners.largest_loss, interval)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(status="certified", source="worst case of a mixture of bounded likelihood ratio")


@dataclass(frozen=True)
class PublishedEvent(Event):
    """Describes one token under the published mollifier, which costs at most ``loss`` at the integer order ``order``.

    The order is fixed, because beta depends on it. At lower orders the loss is not larger; at higher orders it is
    unknown.
    """

    kind: ClassVar[str] = "pmixed-renyi"
    parts: int
    q: float
    order: int
    loss: float

    def __post_init__(self) -> None:
        _check_draw(self.parts, self.q)
        if not isinstance(self.order, int) or self.order < 2:
            raise ValueError(f"order must be an integer of at least 2, got {self.order}")
        if not 0.0 < self.loss < np.inf:
            raise ValueError(f"loss must be a finite number above 0, got {self.loss}")

    def rdp(self, orders: Orders) -> Divergences:
        return np.where(real_orders(orders) <= self.order, self.loss, np.inf)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(
            status="as published",
            source="Flemings et al. 2024, Theorems 5.1, C.3 and C.4",
            adjacency="part, as published",
            assumes=(*SEPARATE_PARTS, "the published proof holds, to which counter-examples are known"),
        )


@dataclass(frozen=True)
class PMixed(Protocol):
    """Implements PMixED.

    Attributes:
        parts: N, the number of parts.
        q: the probability with which each part is drawn for a token.
        radius: c of the ratio mollifier, in nats, which determines its cost.
        mollifier: ``ratio`` or ``renyi``.
        projection: the projection of the ratio mollifier (`privmix.privacy.mollifiers.projection`).
        order: the integer Rényi order of the renyi mollifier.
        loss: the maximum cost of a token at that order with the renyi mollifier. It determines beta for each number of
            drawn parts.

    Raises:
        ValueError: a field is out of range, or does not belong to the mollifier.
    """

    name: ClassVar[str] = "pmixed"
    parts: int
    q: float
    radius: float | None = None
    mollifier: Mollifier = "ratio"
    projection: Projection = "clip"
    order: int | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        _check_choice("mollifier", self.mollifier, get_args(Mollifier))
        _check_choice("projection", self.projection, get_args(Projection))
        event = self.event
        if isinstance(event, RatioEvent):
            low, high = radii(1)
            if not low <= event.radius <= high:
                raise ValueError(f"radius must be from {low} to {high}, got {event.radius}")

    @property
    def rows(self) -> int | None:
        if self.mollifier == "ratio":
            return 1
        return self.parts if self.q == 1 else None

    def draw(self) -> tuple[int, ...]:
        drawn = poisson_subsample(self.parts, self.q)
        return (drawn[uniform_below(len(drawn))],) if drawn and self.mollifier == "ratio" else drawn

    def distribution(self, answers: Answers) -> Release:
        """Releases the mean of a sequence's mollified rows; p0 if it has none."""
        return Release(integer_weights(answers, self._mollify))

    @property
    def additive(self) -> bool:
        return self.mollifier == "ratio"

    def partial(self, rows: PartRows) -> Partial:
        """Returns the projected row of the part that is drawn, float32 [S, V]; 0 where none of these parts is."""
        p0 = rows.public[:, None]
        projected = accepted(self._mollify(rows.ratios, p0, 1, scratch("rows", rows.ratios)), p0)
        return Partial(projected.mul_(rows.drawn[:, :, None]).sum(dim=1))

    def combine(self, public: Tensor, sums: Tensor, charges: Tensor | None = None) -> Release:
        """Projected rows are above 0 where p0 is, so that a sum of 0 says that no part was drawn: p0 answers."""
        nobody = (sums.amax(dim=1, keepdim=True) == 0).to(sums.dtype)
        return Release(scaled(torch.addcmul(sums, public, nobody)))

    def law(self, answers: Answers) -> Tensor | None:
        """Returns the distribution of a token with the ratio mollifier; see `Protocol.law`."""
        if self.mollifier != "ratio":
            return None
        mean = integer_weights(answers, self._mollify).double()
        mean /= mean.sum(dim=1, keepdim=True)
        public = answers.public.double()
        public /= public.sum(dim=1, keepdim=True)
        return torch.lerp(public, mean, draw_chances(self.parts, self.q)[1])

    def draws(self, kinds: Sequence[int]) -> Mapping[tuple[int, ...], float]:
        """Returns the probabilities of draws: with ratio, one uniform part or none; with renyi, each part with q."""
        if self.mollifier == "ratio":
            single_draws = map(tuple, np.eye(len(kinds), dtype=int).tolist())
            no_part, some_part = draw_chances(self.parts, self.q)
            chances = (some_part * count / self.parts for count in kinds)
            return {(0,) * len(kinds): no_part, **dict(zip(single_draws, chances, strict=True))}
        return {
            drawn: math.prod(
                float(scipy.stats.binom.pmf(count, of, self.q)) for count, of in zip(drawn, kinds, strict=True)
            )
            for drawn in product(*(range(count + 1) for count in kinds))
        }

    @cached_property
    def event(self) -> RatioEvent | PublishedEvent:
        if self.mollifier == "ratio":
            if self.radius is None or self.order is not None or self.loss is not None:
                raise ValueError("the ratio mollifier takes radius, and neither order nor loss")
            return RatioEvent(self.parts, self.q, self.radius)
        if self.radius is not None or self.order is None or self.loss is None:
            raise ValueError("the renyi mollifier takes order and loss, and no radius")
        return PublishedEvent(self.parts, self.q, self.order, self.loss)

    def _mollify(self, ratios: Tensor, public: Tensor, drawn: int, out: Tensor) -> Tensor:
        match self.event:
            case RatioEvent(radius=radius):
                project = projection.clip if self.projection == "clip" else projection.mix
                return project(ratios, public, radius - slack(1, radius), out)
            case PublishedEvent(_, q, order, loss):
                return renyi.mollify(ratios, public, order, published.largest_beta(order, q, drawn, loss) * order, out)


class PMixedSettings(Settings):
    """One random part for each token, moved close to the public model."""

    mechanism: ClassVar[type[Protocol]] = PMixed
    choose: ClassVar[str] = "a certified bound for a known number of tokens"
    derived: ClassVar[str | None] = "radius"

    protocol: Literal["pmixed"] = "pmixed"
    mollifier: Mollifier = Field(PMixed.mollifier, description="ratio is certified; renyi is Algorithm 1, as published")
    projection: Projection = Field(
        PMixed.projection, description="ratio: the closest member of the ball in KL, or a mixture with p0"
    )
    q: float = Field(
        1.0,
        gt=0,
        le=1,
        description="the probability of drawing a part; if none is drawn, (1-q)^N, the public model answers",
    )
    radius: float | None = Field(None, gt=0, description="ratio: c, of the ball around p0, in nats")
    order: int = Field(3, ge=2, description="renyi: the integer Rényi order of its ball and its accounting")

    def plan(self, parts: int, kept: Accountant | None = None) -> PMixed:
        if self.mollifier == "renyi":
            if self.radius is not None:
                raise ValueError("radius: the renyi mollifier has a beta for each number of parts drawn instead")
            loss = published.total_loss(self.order, self.budget, self.delta) * ROUNDING_MARGIN / self.tokens
            return PMixed(parts, self.q, mollifier="renyi", order=self.order, loss=loss)
        radius = self.radius or self.largest(lambda radius: RatioEvent(parts, self.q, radius), radii(1), kept)
        return PMixed(parts, self.q, radius, projection=self.projection)

    def details(self, protocol: Protocol) -> Mapping[str, Any]:
        match protocol.event:
            case PublishedEvent(parts, q, order, loss):
                drawn = range(1, parts + 1)
                return {"beta": {str(count): published.largest_beta(order, q, count, loss) for count in drawn}}
            case _:
                return {}


@lru_cache(maxsize=64)
def radii(parts: int) -> tuple[float, float]:
    """Returns the smallest and the largest radius for a mean of ``parts`` rows that lose little to `slack`."""
    return usable_radii(lambda radius: slack(parts, radius), 1e-6, 0.25)


def _check_draw(parts: int, q: float) -> None:
    check_parts(parts)
    if not 0.0 < q <= 1.0:
        raise ValueError(f"q must lie above 0 and at most 1, got {q}")


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field} must be one of {', '.join(choices)}, got {value!r}")
