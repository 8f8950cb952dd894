"""Implements SubMix, private next-token prediction with models of half-parts (Ginart, van der Maaten, Zou, Guo 2022).

Each part is divided into halves, with one model for each half. SubMix assumes that what both halves say is not due to
one user: lambda_i is the largest weight of both halves in mixtures with the public model for which the divergence of
the mixtures is at most beta. The mean of all lambda_i is the weight of the mean of all models in a mixture with the
public model. Each part has its own budget, which is charged the divergence that leaving the part out causes. Once a
part's budget would be exceeded, the public model answers all further queries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from privmix.foundation.lazily import torch
from privmix.privacy import accounting
from privmix.privacy.accounting import published
from privmix.privacy.accounting.leave_one_out import symmetrised
from privmix.privacy.accounting.published import removal_then_addition
from privmix.privacy.events import Accountant, Divergences, Event, Guarantee, Orders, check_parts, real_orders
from privmix.privacy.mollifiers.agreement import check_bound, largest_weights
from privmix.privacy.mollifiers.blocks import Column, column, rows_at_once, scratch
from privmix.privacy.protocol import Answers, Protocol, Release
from privmix.privacy.sampling.categorical import quantise
from privmix.privacy.settings import ROUNDING_MARGIN, Enforced, Settings

if TYPE_CHECKING:
    from torch import Tensor

# The conversion to users needs an order above 2. At the default budget, this order has the most to spend relative to
# the order; order 2 has nothing.
_ORDER = 4.0


@dataclass(frozen=True)
class SubMixEvent(Event):
    """Describes one token, for which no data-independent bound is known."""

    kind: ClassVar[str] = "submix"
    measured: ClassVar[bool] = True
    parts: int
    order: float
    beta: float

    def __post_init__(self) -> None:
        check_parts(self.parts)
        if not 1 < self.order < np.inf:
            raise ValueError(f"order must be a finite number above 1, got {self.order}")
        check_bound(self.beta)

    def rdp(self, orders: Orders) -> Divergences:
        return np.full(len(real_orders(orders)), np.inf)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(
            status="operational",
            source="Ginart et al. 2022, measured on the private text",
            adjacency="part, as published",
            assumes=(
                "each half-part's model depends on that half alone",
                "a user's part depends on that user alone",
                "only the answers that were given count, not those that the same query might have had",
                "epsilon, which depends on the private text, is seen by the operator alone",
                "when the public model takes over tells nothing (random stopping bounds what an end that a part causes "
                "tells)",
            ),
            notion="Rényi operational privacy",
        )


@dataclass(frozen=True)
class SubMix(Protocol):
    """Implements SubMix.

    Attributes:
        parts: N, the number of parts. Models 2i and 2i + 1 belong to the halves of part i.
        order: the Rényi order a of the halves' agreement and of the measured losses.
        beta: the largest D_a between the mixtures of a part's halves with the public model.

    Raises:
        ValueError: a field is out of range.
    """

    name: ClassVar[str] = "submix"
    halves: ClassVar[bool] = True
    parts: int
    order: float
    beta: float

    def __post_init__(self) -> None:
        SubMixEvent(self.parts, self.order, self.beta)

    def distribution(self, answers: Answers) -> Release:
        weights = torch.empty(answers.public.shape, dtype=torch.int64, device=answers.public.device)
        losses = np.zeros((len(weights), self.parts))
        for s, (first, last) in enumerate(answers.spans()):
            parts = [model // 2 for model in answers.models[s][::2]]
            mean, losses[s, parts] = self._mean(answers.ratios[first:last], answers.public[s])
            weights[s] = quantise(mean[None])[0]
        return Release(weights, losses)

    @cached_property
    def event(self) -> SubMixEvent:
        return SubMixEvent(self.parts, self.order, self.beta)

    def _mean(self, ratios: Tensor, public: Tensor) -> tuple[Tensor, Column]:
        """Returns the output distribution of one sequence, float64 [V], and the losses of its parts, float64 [n].

        The distribution without part i uses the mean lambda and the mean answer of the other parts.
        """
        p0 = public.double()
        p0 /= p0.sum()
        pairs = ratios.view(-1, 2, len(public))
        if not len(pairs):
            return p0, np.zeros(0)
        at_once = rows_at_once(pairs.flatten(1))
        blocks = [slice(start, start + at_once) for start in range(0, len(pairs), at_once)]
        weights = np.concatenate([largest_weights(pairs[block], public, self.order, self.beta) for block in blocks])
        total = torch.zeros_like(p0)
        for block in blocks:
            total += _answers(pairs[block], p0).sum(dim=0)
        mean = torch.lerp(p0, total / len(pairs), weights.mean())
        if len(pairs) == 1:
            return mean, symmetrised(mean[None].clone(), p0, self.order)
        losses, others = np.empty(len(pairs)), (weights.sum() - weights) / (len(pairs) - 1)
        for block in blocks:
            own = _answers(pairs[block], p0)
            without = torch.sub(total, own, out=own).div_(len(pairs) - 1)
            without = torch.lerp(p0, without, column(others[block].clip(0, 1), without), out=without)
            losses[block] = symmetrised(without, mean, self.order)
        return mean, losses


class SubMixSettings(Settings):
    """All half-part models, weighted by the agreement of halves, with one budget for each part."""

    mechanism: ClassVar[type[Protocol]] = SubMix
    choose: ClassVar[str] = "utility first, where operational privacy will do and the halves agree"
    derived: ClassVar[str | None] = "beta"

    protocol: Literal["submix"] = "submix"
    order: float = Field(_ORDER, gt=1, description="the Rényi order of the agreement and of the measured losses")
    beta: float | None = Field(None, gt=0, description="the largest divergence between a part's halves, mixed")
    random_stopping: float | None = Field(
        None,
        gt=0.5,
        description="C: STOP at the latest before a token whose number is drawn uniformly from 1 to C times `tokens`",
    )

    @property
    def enforced(self) -> Enforced:
        return "measured"

    @property
    def when_exhausted(self) -> Literal["refuse", "public"]:
        return "public"

    @property
    def stop_within(self) -> int | None:
        return None if self.random_stopping is None else math.ceil(self.random_stopping * self.tokens)

    def plan(self, parts: int, kept: Accountant | None = None) -> SubMix:
        if kept is not None and kept.order != self.order:
            raise ValueError(f"order must be the ledger's, {kept.order:g}, got {self.order:g}")
        return SubMix(parts, self.order, self.beta or self._part_budget * ROUNDING_MARGIN / self.tokens)

    def details(self, protocol: Protocol) -> Mapping[str, Any]:
        if self.epsilon is None:
            return {}
        loss = self._part_budget
        details: dict[str, Any] = {"order": self.order, "part_budget": loss}
        if self.stop_within is not None:
            fixed = random_stopping(loss, self.stop_within)
            details["fixed_length"] = {"loss": fixed, "epsilon": self._converted(self.order, fixed)}
        if self.order > 2:
            order, loss = partition_to_user(self.order, loss)
            details["user"] = {"order": order, "loss": loss, "epsilon": self._converted(order, loss)}
        return details

    @property
    def _part_budget(self) -> float:
        """The maximum Rényi loss of each part at `order`."""
        return published.total_loss(self.order, self.budget, self.delta)

    def _converted(self, order: float, loss: float) -> float:
        return accounting.round_up(accounting.epsilon(np.array([loss]), self.delta, [order]).epsilon)


def random_stopping(loss: float, tokens: int) -> float:
    """Returns the Rényi loss for an observer who also sees the length of the output (Proposition C.3).

    The protocol must also stop before a token whose number is drawn uniformly from 1 to ``tokens`` (C times B). Where a
    part ends the output, even before the first token, that draw alone would have ended it there with probability 1 /
    ``tokens``. This holds for every C. It says nothing about an output that goes on where another part's data would
    have ended it, which operational privacy does not count.
    """
    return loss + math.log(tokens)


def partition_to_user(order: float, loss: float) -> tuple[float, float]:
    """Converts (a, epsilon) for a part to (a/2, (2a-3)/(a-2) epsilon) for a user's text (Theorem C.1).

    Raises:
        ValueError: the order is not above 2.
    """
    if not order > 2:
        raise ValueError(f"order must be above 2 for a bound for users, got {order:g}")
    # At lower orders the loss is not larger.
    return order / 2, float(removal_then_addition(lambda orders: np.full(np.size(orders), loss), order / 2)[0])


def _answers(pairs: Tensor, p0: Tensor) -> Tensor:
    """Returns the mean of each pair's two normalised distributions [C, 2, V], float64 [C, V], in scratch memory."""
    halves = scratch("halves", pairs, torch.float64).copy_(pairs).mul_(p0)
    halves /= 2 * halves.sum(dim=2, keepdim=True)
    return torch.sum(halves, dim=1, out=scratch("own", pairs[:, 0], torch.float64))
