"""Implements a toy protocol in one file: randomized response over the public model's two most likely tokens.

With probability ``keep`` the token is the one that the drawn part ranks first; otherwise it is either of the two with
equal probability (Warner 1965).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.common import DifferentialPrivacyParameters
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from pydantic import Field

from privmix.privacy.accounting import planning
from privmix.privacy.accounting.bounded_range import bounded_range_rdp
from privmix.privacy.arrays import Reals
from privmix.privacy.events import PLD_INTERVAL, Accountant, Divergences, Event, Guarantee, Orders, check_parts
from privmix.privacy.mollifiers.candidates import Candidates
from privmix.privacy.protocol import Answers, Protocol, Release
from privmix.privacy.sampling.categorical import quantise
from privmix.privacy.sampling.randomness import uniform_below
from privmix.privacy.settings import Settings
from privmix.privacy.worlds import Pair, one_hot, replaced


@dataclass(frozen=True)
class ToyEvent(Event):
    """One token. A part changes a probability by keep / parts, and each probability is at least (1 - keep) / 2."""

    kind: ClassVar[str] = "toy"
    parts: int
    keep: float

    def __post_init__(self) -> None:
        check_parts(self.parts)
        if not 0 < self.keep < 1:
            raise ValueError(f"keep must lie between 0 and 1, got {self.keep}")

    @property
    def loss(self) -> float:
        share = self.keep / self.parts
        return float(np.log1p(2 * share / (1 - self.keep)))

    def rdp(self, orders: Orders) -> Divergences:
        return bounded_range_rdp(orders, 2 * self.loss)

    def pld(self, interval: float = PLD_INTERVAL) -> PrivacyLossDistribution:
        pure = DifferentialPrivacyParameters(self.loss, 0.0)
        return privacy_loss_distribution.from_privacy_parameters(pure, interval)

    def worst_pairs(self) -> Iterable[Pair]:
        for agree in range(self.parts):
            others = (0,) * agree + (1,) * (self.parts - 1 - agree)
            yield replaced(np.log([0.49, 0.51]), one_hot(2, 0, 1), others, 0, 1)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(status="certified", source="Warner 1965")


@dataclass(frozen=True)
class Toy(Protocol):
    """Applies randomized response to the choice of one part, drawn uniformly."""

    name: ClassVar[str] = "toy"
    order = None
    parts: int
    keep: float

    @property
    def rows(self) -> int:
        return 1

    def draw(self) -> tuple[int, ...]:
        return (uniform_below(self.parts),)

    def draws(self, kinds: Sequence[int]) -> Mapping[tuple[int, ...], float]:
        one_of = map(tuple, np.eye(len(kinds), dtype=int).tolist())
        return dict(zip(one_of, (count / self.parts for count in kinds), strict=True))

    def distribution(self, answers: Answers) -> Release:
        likeliest = Candidates.of(answers.public, 2)
        first = likeliest.probabilities(answers).argmax(dim=1, keepdim=True)
        chances = torch.full(likeliest.tokens.shape, (1 - self.keep) / 2, dtype=torch.float64)
        chances.scatter_add_(1, first, torch.full(first.shape, self.keep, dtype=torch.float64))
        weights = torch.zeros(answers.public.shape, dtype=torch.float64)
        return Release(quantise(weights.scatter_(1, likeliest.tokens, chances)))

    def formula(self, public: Reals, rows: Reals) -> Reals:
        first, second = sorted(np.argsort(public)[-2:], key=lambda token: -rows[0, token])
        chances = np.zeros_like(public)
        chances[first], chances[second] = (1 + self.keep) / 2, (1 - self.keep) / 2
        return chances

    @cached_property
    def event(self) -> ToyEvent:
        return ToyEvent(self.parts, self.keep)


class ToySettings(Settings):
    """Settings of randomized response over two tokens."""

    mechanism: ClassVar[type[Protocol]] = Toy
    choose: ClassVar[str] = "a test"
    derived: ClassVar[str | None] = "keep"

    protocol: Literal["toy"] = "toy"
    keep: float | None = Field(None, gt=0, lt=1, description="the chance that the part's choice is kept")

    def plan(self, parts: int, kept: Accountant | None = None) -> Toy:
        keep = self.keep or planning.largest(
            lambda keep: ToyEvent(parts, keep), self.tokens, self.budget, self.delta, (1e-6, 1 - 1e-6)
        )
        return Toy(parts, keep)
