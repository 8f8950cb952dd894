"""Implements a reference without privacy: the mean of all part models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from privmix.foundation.lazily import torch
from privmix.privacy.events import Accountant, Divergences, Event, Guarantee, Orders, real_orders
from privmix.privacy.mollifiers.mixture import integer_weights
from privmix.privacy.protocol import Answers, Protocol, Release
from privmix.privacy.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EnsembleEvent(Event):
    """Describes a token of the mean of all part models, whose cost is unbounded."""

    kind: ClassVar[str] = "ensemble"

    def rdp(self, orders: Orders) -> Divergences:
        return np.full(real_orders(orders).shape, np.inf)

    @property
    def guarantee(self) -> Guarantee:
        return unprotected("the mean of the part models is sampled as it is, for comparison")


@dataclass(frozen=True)
class Ensemble(Protocol):
    """Samples from the mean of all part models, without privacy."""

    name: ClassVar[str] = "ensemble"
    order = None
    parts: int

    def distribution(self, answers: Answers) -> Release:
        return Release(integer_weights(answers, _unchanged))

    @cached_property
    def event(self) -> EnsembleEvent:
        return EnsembleEvent()


class EnsembleSettings(Settings):
    """The mean of all part models, without privacy."""

    mechanism: ClassVar[type[Protocol]] = Ensemble
    choose: ClassVar[str] = "the reference for what privacy costs an ensemble; never where the text is private"

    protocol: Literal["ensemble"] = "ensemble"
    epsilon: None = Field(None, description="none: no budget is kept")

    def plan(self, parts: int, kept: Accountant | None = None) -> Ensemble:
        return Ensemble(parts)


def _unchanged(ratios: Tensor, public: Tensor, drawn: int, out: Tensor) -> Tensor:
    return torch.mul(ratios, public, out=out)


def unprotected(source: str) -> Guarantee:
    """Returns the guarantee of a reference, which guarantees nothing."""
    return Guarantee(status="none", source=source, assumes=())
