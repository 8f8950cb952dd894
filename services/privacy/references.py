"""What the protocols are compared with: the public model, and what fine-tuning gives without privacy."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from pydantic import Field
from torch import Tensor

from services.privacy.channel import real_orders
from services.privacy.events import PLD_INTERVAL, Divergences, Event, Guarantee, Orders
from services.privacy.mixture import integer_weights
from services.privacy.protocol import Answers, Protocol, Release
from services.privacy.settings import Settings


@dataclass(frozen=True)
class PublicEvent(Event):
    """A token of the public model: costs nothing."""

    kind: ClassVar[str] = "public"

    def rdp(self, orders: Orders) -> Divergences:
        return np.zeros(real_orders(orders).shape)

    def pld(self, interval: float = PLD_INTERVAL) -> PrivacyLossDistribution:
        return privacy_loss_distribution.identity(interval)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(status="certified", source="nothing private is read", assumes=())


@dataclass(frozen=True)
class EnsembleEvent(Event):
    """A token of the mean of all part models: costs without limit."""

    kind: ClassVar[str] = "ensemble"

    def rdp(self, orders: Orders) -> Divergences:
        return np.full(real_orders(orders).shape, np.inf)

    @property
    def guarantee(self) -> Guarantee:
        return _none("the mean of the part models is sampled as it is, for comparison")


@dataclass(frozen=True)
class FinetunedEvent(EnsembleEvent):
    """A token of one model fine-tuned on the whole corpus: costs without limit."""

    kind: ClassVar[str] = "finetuned"

    @property
    def guarantee(self) -> Guarantee:
        return _none("a model fine-tuned on the whole corpus is sampled as it is, for comparison")


@dataclass(frozen=True)
class Public(Protocol):
    """The public model alone."""

    name: ClassVar[str] = "public"
    order = None
    parts: int

    @property
    def rows(self) -> int:
        return 0

    def draw(self) -> tuple[int, ...]:
        return ()

    def release(self, answers: Answers) -> Release:
        return Release(integer_weights(answers, _public))

    @cached_property
    def event(self) -> PublicEvent:
        return PublicEvent()


@dataclass(frozen=True)
class Ensemble(Protocol):
    """The mean of all part models, without privacy."""

    name: ClassVar[str] = "ensemble"
    order = None
    parts: int

    @property
    def rows(self) -> int:
        return self.parts

    def draw(self) -> tuple[int, ...]:
        return tuple(range(self.parts))

    def release(self, answers: Answers) -> Release:
        return Release(integer_weights(answers, _unchanged))

    @cached_property
    def event(self) -> EnsembleEvent:
        return EnsembleEvent()


@dataclass(frozen=True)
class Finetuned(Ensemble):
    """One model fine-tuned on the whole corpus, without privacy: an ensemble of one part.

    Raises:
        ValueError: the ensemble has more parts.
    """

    name: ClassVar[str] = "finetuned"

    def __post_init__(self) -> None:
        if self.parts != 1:
            raise ValueError(
                f"parts must be 1 for protocol finetuned, and this ensemble has {self.parts}: "
                "train one on the whole corpus with `privmix train --parts 1`"
            )

    @cached_property
    def event(self) -> FinetunedEvent:
        return FinetunedEvent()


class PublicSettings(Settings):
    """The public model alone: what can be had without private text."""

    asks: ClassVar[str] = "no part model"
    choose: ClassVar[str] = "the reference below which a protocol is not worth its cost"

    protocol: Literal["public"] = "public"

    def plan(self, parts: int, order: float | None = None) -> Public:
        return Public(parts)


class EnsembleSettings(Settings):
    """The mean of all part models, without privacy."""

    asks: ClassVar[str] = "the whole-part models of all parts"
    choose: ClassVar[str] = "the reference for what privacy costs an ensemble; never where the text is private"

    protocol: Literal["ensemble"] = "ensemble"
    epsilon: None = Field(None, description="none: no budget is kept")

    def plan(self, parts: int, order: float | None = None) -> Ensemble:
        return Ensemble(parts)


class FinetunedSettings(Settings):
    """One model fine-tuned on the whole corpus, without privacy."""

    asks: ClassVar[str] = "the one model of an ensemble of one part"
    one_model: ClassVar[bool] = True
    choose: ClassVar[str] = "the reference for what partition and privacy cost; never where the text is private"

    protocol: Literal["finetuned"] = "finetuned"
    epsilon: None = Field(None, description="none: no budget is kept")

    def plan(self, parts: int, order: float | None = None) -> Finetuned:
        return Finetuned(parts)


def _unchanged(ratios: Tensor, public: Tensor, drawn: int, out: Tensor) -> Tensor:
    return torch.mul(ratios, public, out=out)


def _public(ratios: Tensor, public: Tensor, drawn: int, out: Tensor) -> Tensor:
    return out.copy_(public.expand_as(out))


def _none(source: str) -> Guarantee:
    return Guarantee(status="none", source=source, assumes=())
