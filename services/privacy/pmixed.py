"""PMixED: private mixing of ensemble distributions (Flemings, Razaviyayn, Annavaram 2024).

For each token every part is drawn with probability q; the distribution of each part drawn is moved towards the public
model's by a mollifier; the token is sampled from their mean, or from the public model where no part was drawn.

Two mollifiers. ``ratio`` bounds the likelihood ratio to the public model; its cost is known exactly and certified.
``renyi`` is Algorithm 1 as published.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from pydantic import Field
from scipy.optimize import brentq
from torch import Tensor

from services.privacy import planning, projection, published, renyi
from services.privacy.channel import ratio_channel, real_orders, replacement_rdp
from services.privacy.events import (
    PLD_INTERVAL,
    SEPARATE_PARTS,
    Divergences,
    Event,
    Guarantee,
    Orders,
    check_parts,
)
from services.privacy.mixture import integer_weights, slack
from services.privacy.protocol import Answers, Protocol, Release
from services.privacy.randomness import poisson_subsample
from services.privacy.settings import ROOM, Settings

Mollifier = Literal["ratio", "renyi"]
Projection = Literal["clip", "mix"]
Asked = Literal["drawn", "one"]

# The largest share of a radius that rounding may take.
_LARGEST_LOSS = 0.1


@dataclass(frozen=True)
class RatioEvent(Event):
    """One token under the ratio mollifier. ``parts`` counts the part that is or is not there; ``radius`` in nats.

    N is a parameter of the mechanism, not a number that is read off the ensemble: where the part is not there it is
    never drawn, and all else, rounding included, is as if it were.
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
        return ratio_channel(self.parts, self.q, self.radius).rdp(orders)

    def user_rdp(self, orders: Orders) -> Divergences:
        return replacement_rdp(self.parts, self.q, self.radius, orders)

    def pld(self, interval: float = PLD_INTERVAL) -> PrivacyLossDistribution:
        channel = ratio_channel(self.parts, self.q, self.radius)
        without = dict(enumerate(channel.log_q.tolist()))
        present = dict(enumerate((channel.log_q + channel.log_ratio).tolist()))
        return privacy_loss_distribution.from_two_probability_mass_functions(
            without, present, value_discretization_interval=interval, symmetric=False
        )

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(status="certified", source="worst case of a subsampled mixture of bounded likelihood ratio")


@dataclass(frozen=True)
class PublishedEvent(Event):
    """One token under the published mollifier, each costing at most ``loss`` at the integer order ``order``.

    The order is fixed: beta is chosen for it. At a lower order the loss is at most the same; above, unknown.
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
            assumes=(*SEPARATE_PARTS, "the published proof holds, to which counter-examples are known"),
        )


@dataclass(frozen=True)
class PMixed(Protocol):
    """PMixED.

    Attributes:
        parts: N, how many parts the ensemble has.
        q: the probability with which each is drawn for a token.
        radius: c of the ratio mollifier, in nats; what its event is accounted with.
        mollifier: ``ratio`` or ``renyi``.
        projection: how the ratio mollifier reaches its ball (`services.privacy.projection`).
        order: integer Rényi order of the renyi mollifier.
        loss: what a token of the renyi mollifier may cost at that order; beta follows, per number of parts drawn.
        asked: ``drawn`` asks every part drawn. ``one`` asks one of them, chosen uniformly: a token sampled from a
            uniformly chosen member of a mean has the law of the mean, so what is released, and what it costs, are the
            same, for a fraction of the models' work. Not with ``renyi``, whose beta depends on how many were drawn.

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
    asked: Asked = "drawn"

    def __post_init__(self) -> None:
        _check_choice("mollifier", self.mollifier, get_args(Mollifier))
        _check_choice("projection", self.projection, get_args(Projection))
        _check_choice("asked", self.asked, get_args(Asked))
        if self.mollifier == "renyi" and self.asked == "one":
            raise ValueError("asked must be 'drawn' with the renyi mollifier: its beta depends on how many are drawn")
        event = self.event
        if isinstance(event, RatioEvent):
            low, high = radii(event.parts)
            if not low <= event.radius <= high:
                raise ValueError(f"radius must be from {low:.3g} to {high:.3g} with these parts, got {event.radius:g}")

    @property
    def rows(self) -> int | None:
        if self.asked == "one":
            return 1
        return self.parts if self.q == 1 else None

    def draw(self) -> tuple[int, ...]:
        drawn = poisson_subsample(self.parts, self.q)
        return (secrets.choice(drawn),) if self.asked == "one" and drawn else drawn

    def release(self, answers: Answers) -> Release:
        return Release(integer_weights(answers, self._mollify))

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
            case RatioEvent(parts, _, radius):
                project = projection.clip if self.projection == "clip" else projection.mix
                return project(ratios, public, radius - slack(parts, radius), out)
            case PublishedEvent(_, q, order, loss):
                return renyi.mollify(ratios, public, order, published.largest_beta(order, q, drawn, loss) * order, out)


class PMixedSettings(Settings):
    """Poisson-subsampled parts, each moved close to the public model, averaged and sampled."""

    asks: ClassVar[str] = "the whole-part model of each part drawn (`asked: one`: of one of them)"
    choose: ClassVar[str] = "a certified bound for a known number of tokens"
    derived: ClassVar[str | None] = "radius"

    protocol: Literal["pmixed"] = "pmixed"
    mollifier: Mollifier = Field("ratio", description="ratio is certified; renyi is Algorithm 1, as published")
    projection: Projection = Field(
        "clip", description="ratio: the closest member of the ball in KL, or a mixture with p0"
    )
    q: float = Field(1.0, gt=0, le=1, description="the probability with which a part is drawn for a token")
    radius: float | None = Field(None, gt=0, description="ratio: c, of the ball around p0, in nats")
    asked: Asked = Field("drawn", description="ask every part drawn, or one of them: the same law for less work")
    order: int = Field(3, ge=2, description="renyi: the integer Rényi order of its ball and its accounting")

    def plan(self, parts: int, order: float | None = None) -> PMixed:
        if self.mollifier == "renyi":
            if self.radius is not None:
                raise ValueError("radius: the renyi mollifier has a beta for each number of parts drawn instead")
            loss = published.total_loss(self.order, self.budget, self.delta) * ROOM / self.tokens
            return PMixed(parts, self.q, mollifier="renyi", order=self.order, loss=loss, asked=self.asked)
        radius = self.radius or planning.largest(
            lambda radius: RatioEvent(parts, self.q, radius), self.tokens, self.budget, self.delta, radii(parts)
        )
        return PMixed(parts, self.q, radius, projection=self.projection, asked=self.asked)

    def details(self, protocol: Protocol) -> Mapping[str, Any]:
        match protocol.event:
            case PublishedEvent(parts, q, order, loss):
                drawn = range(1, parts + 1)
                return {"beta": {str(count): published.largest_beta(order, q, count, loss) for count in drawn}}
            case _:
                return {}


@lru_cache(maxsize=64)
def radii(parts: int) -> tuple[float, float]:
    """The smallest and the largest radius that can be kept to while little of it is lost to rounding (`slack`)."""

    def left(radius: float) -> float:
        return _LARGEST_LOSS * radius - slack(parts, radius)

    return brentq(left, 1e-6, 0.25), brentq(left, 0.25, 32.0)


def _check_draw(parts: int, q: float) -> None:
    check_parts(parts)
    if not 0.0 < q <= 1.0:
        raise ValueError(f"q must lie above 0 and at most 1, got {q}")


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field} must be one of {', '.join(choices)}, got {value!r}")
