"""Implements a reference that reads no private text: the public model alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np

from privmix.privacy.events import PLD_INTERVAL, Accountant, Divergences, Event, Guarantee, Orders, real_orders
from privmix.privacy.mollifiers.mixture import integer_weights
from privmix.privacy.protocol import Answers, Protocol, Release
from privmix.privacy.settings import Settings, Training

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from torch import Tensor


@dataclass(frozen=True)
class PublicEvent(Event):
    """Describes a token of the public model, which costs nothing."""

    kind: ClassVar[str] = "public"

    def rdp(self, orders: Orders) -> Divergences:
        return np.zeros(real_orders(orders).shape)

    def pld(self, interval: float = PLD_INTERVAL) -> PrivacyLossDistribution:
        from dp_accounting.pld import privacy_loss_distribution  # slow to import

        return privacy_loss_distribution.identity(interval)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(status="certified", source="nothing private is read", assumes=())


@dataclass(frozen=True)
class Public(Protocol):
    """Samples from the public model alone."""

    name: ClassVar[str] = "public"
    order = None
    parts: int

    @property
    def rows(self) -> int:
        return 0

    def draw(self) -> tuple[int, ...]:
        return ()

    def draws(self, kinds: Sequence[int]) -> Mapping[tuple[int, ...], float]:
        return {(0,) * len(kinds): 1.0}

    def distribution(self, answers: Answers) -> Release:
        return Release(integer_weights(answers, _public))

    @cached_property
    def event(self) -> PublicEvent:
        return PublicEvent()


class PublicSettings(Settings):
    """The public model alone: what can be had without private text."""

    mechanism: ClassVar[type[Protocol]] = Public
    choose: ClassVar[str] = "the reference below which a protocol is not worth its cost"

    protocol: Literal["public"] = "public"

    def plan(self, parts: int, kept: Accountant | None = None) -> Public:
        return Public(parts)

    def for_training(self, training: Training | None) -> Self:
        """Returns these settings unchanged, because the protocol reads no trained model."""
        return self


def _public(ratios: Tensor, public: Tensor, drawn: int, out: Tensor) -> Tensor:
    return out.copy_(public.expand_as(out))
