"""Divides epsilon between a private base and the tokens of an ensemble on it, before any training.

    divide(requirements, propose(requirements))
    base_share(64, TokenBudget(epsilon=8, delta=1e-5, tokens=16_384))

The tokens of a base that DP-SGD trained cost nothing, and an ensemble on it adds less than it gains alone.
`base_gain.json`, which `tests.benchmarks.private_base` measures on public text, has the gain of DP-SGD by its signal,
and the fraction of an ensemble's gain that is left on a base, by the base's. `LEAVES_OUT` lists what it does not cover.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from privmix.foundation.errors import InputError
from privmix.privacy.protocols.dp_sgd import DpSgdEvent
from privmix.training.dp_sgd import planned
from privmix.training.expectation import (
    MIN_USERS_PER_PART_OF_UNKNOWN_SIZE,
    TOLERANCE,
    Population,
    Proposal,
    Range,
    Requirements,
    interpolated,
    propose,
)
from privmix.training.options import DpSgdOptions, TokenBudget

BASE_TABLE = Path(__file__).with_name("base_gain.json")
SHARES = (*(tenths / 10 for tenths in range(10)), 0.95, 1.0)
"""The shares of epsilon that are considered for the base."""
TOKENS_PER_USER = 512
"""The assumed length of a user's text: one block of DP-SGD's recipe."""

LEAVES_OUT = (
    "other text and other models, and users with more text than was measured: a base learns more from them",
    "larger corpora than were measured: their bases count as the largest measured one",
    "few users stand for all in the measurements, which takes from the base more than from the parts",
    "contexts: what a base gains is mostly at the beginning of a text",
)


def signal(event: DpSgdEvent, users: int) -> float:
    """Returns the sum of all users' clipped gradients over all steps, at most, in deviations of the noise on it.

    With a recipe, and batches of all users, epsilon and the number of users change what is learnt through it alone.
    """
    return users * event.sampling_rate * math.sqrt(event.steps) / event.noise_multiplier


@dataclass(frozen=True)
class MeasuredBases:
    """Holds `base_gain.json`."""

    table: Mapping[str, Any]

    @classmethod
    @cache
    def load(cls) -> Self:
        return cls(json.loads(BASE_TABLE.read_bytes()))

    def gain(self, strength: float) -> dict[str, float]:
        """Returns the gain of DP-SGD at a signal on each measured corpus, in nats per token."""
        return {
            name: interpolated(strength, {key: float(np.mean(runs)) for key, runs in corpus["gain_by_signal"].items()})
            for name, corpus in self.table["corpora"].items()
        }

    def added(self, base: Mapping[str, float], alone: Mapping[str, float]) -> dict[str, float]:
        """Returns what ensembles add to bases on each corpus, from what both gain alone."""
        return {
            name: alone[name] * interpolated(base[name], corpus["kept_by_gain"], at_0=1.0)
            for name, corpus in self.table["corpora"].items()
        }

    @property
    def source(self) -> str:
        table = self.table
        corpora = [
            f"{name} ({corpus['size']['users']} users and {corpus['size']['standing']} parts stand for all)"
            for name, corpus in table["corpora"].items()
        ]
        return (
            f"measured {table['measured']} on {', '.join(corpora)}, with {table['model']}: "
            "services/privmix/training/base_gain.json; python -m tests.benchmarks.private_base repeats it"
        )


@dataclass(frozen=True)
class Division:
    """Holds a share of epsilon for a private base, and what both sides are expected to gain.

    Attributes:
        share: 0 for an ensemble on the public model, 1 for DP-SGD without parts.
        base: the gain of the base over the public model on each measured corpus, in nats per token, for any number of
            tokens; empty, as `added`, if the size of the corpus is unknown.
        parts: the ensemble on the base; None at a share of 1.
        added: what the ensemble adds on each corpus, for the tokens of the budget.
    """

    share: float
    base: Mapping[str, float]
    parts: Proposal | None
    added: Mapping[str, float]

    @property
    def gain(self) -> Range | None:
        """The gain over the public model while the budget lasts, in nats per token; None if the size is unknown."""
        return Range.of([gain + self.added[name] for name, gain in self.base.items()]) if self.base else None

    @property
    def worth(self) -> float:
        """The number by which divisions are compared."""
        if (gain := self.gain) is None:
            assert self.parts is not None  # without a gain, nothing is known of a base
            return self.parts.worth
        return gain.mean


def alternatives(wanted: Requirements) -> list[Division]:
    """Returns the ways to spend a budget, the best first: parts alone, a private base alone, and parts on such a base.

    Of ways that are nearly the best, the one with the fewest rows for a token comes first. Individual budgets ask all
    parts for every token, so they never come first unless they are named. Without the size of the corpus, nothing is
    known of bases.

    Raises:
        InputError: no choice meets the requirements.
    """
    chosen = propose(wanted)
    alone = [propose(replace(wanted, part_kind=kind)) for kind in wanted.kinds]
    found: list[Division | None] = [_alone(proposal) for proposal in alone]
    if chosen.gain is not None:
        found = [divide(wanted, chosen, (1.0,)), *found, divide(wanted, chosen, SHARES[1:-1])]
    possible = [division for division in found if division is not None]
    most = max(division.worth for division in possible)
    best = next(division for division in possible if division.worth >= (1 - TOLERANCE) * most)
    if wanted.protocol is None:
        with suppress(InputError):  # a budget can be too small for accounts
            own = replace(wanted, protocol="individual", part_kind=chosen.part_kind)
            possible.append(_alone(propose(own)))
    others = [division for division in possible if division is not best]
    return [best, *sorted(others, key=lambda division: -division.worth)]


def divide(wanted: Requirements, alone: Proposal, shares: Sequence[float] = SHARES) -> Division | None:
    """Returns the division with the largest expected gain, with the number of parts and the protocol of `alone`.

    Returns None if the size of the corpus, or so the gain in nats, is unknown, or if no share is possible.
    """
    if alone.gain is None:
        return None
    fixed = replace(wanted, protocol=alone.settings.protocol, parts=alone.protocol.parts, part_kind=alone.part_kind)
    roughly = propose(fixed, roughly=True)
    divisions = [_division(share, fixed, roughly, roughly=True) for share in shares]
    possible = [division for division in divisions if division is not None]
    possible.sort(key=lambda division: division.worth, reverse=True)
    exact = (_division(division.share, fixed, alone) for division in possible)
    return next((division for division in exact if division is not None), None)


def base_share(parts: int, budget: TokenBudget) -> float:
    """Returns the share of epsilon for a private base below an ensemble, from public numbers alone.

    It is the best share of `divide`: the more tokens, the larger. Each part is assumed to have
    `MIN_USERS_PER_PART_OF_UNKNOWN_SIZE` users, and each user `TOKENS_PER_USER` tokens.

    Args:
        parts: N, the number of parts.
        budget: what the base and the tokens cost together, and the tokens that it must last for.

    Raises:
        InputError: the budget is too small for a base, or does not last for the tokens.
    """
    users = MIN_USERS_PER_PART_OF_UNKNOWN_SIZE * parts
    wanted = Requirements(Population(users, users * TOKENS_PER_USER), budget, parts=parts)
    # An assumed size is not exact enough to refuse a base that the operator asks for.
    division = divide(wanted, propose(wanted), SHARES[1:-1])
    if division is None:
        raise InputError("epsilon: is too small for a private base; leave --base out")
    return division.share


def _division(share: float, wanted: Requirements, alone: Proposal, *, roughly: bool = False) -> Division | None:
    """Returns the expectation at a share; None if what is left of the budget is too small."""
    if not share:
        return _alone(alone)
    budget, measured = wanted.budget, MeasuredBases.load()
    try:
        # Without the name of a run, plans on this base are the same each time, and are made once (`_planned`).
        options = DpSgdOptions.checked(epsilon=share * budget.epsilon, delta=budget.delta)
        event = replace(planned(options, roughly=roughly), run=None)
        parts = propose(replace(wanted, base=event), roughly=roughly) if share < 1 else None
    except InputError:
        return None
    base = measured.gain(signal(event, wanted.population.users))
    added = dict.fromkeys(base, 0.0) if parts is None else measured.added(base, parts.by_corpus)
    return Division(share, base, parts, added)


def _alone(parts: Proposal) -> Division:
    return Division(0.0, dict.fromkeys(parts.by_corpus, 0.0), parts, parts.by_corpus)
