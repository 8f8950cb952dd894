"""Estimates the expected gain of an ensemble over the public model before any training.

    propose(Requirements(Population(users=50_000), TokenBudget(epsilon=8, delta=1e-5, tokens=1_000_000)))

The numbers come from `gain.json`, which `tests.benchmarks.gain` measures on public text, for adapters and for texts as
parts: the gain of parts of several sizes, and the fraction of an ensemble's gain that a protocol keeps at each radius.
Other corpora lead to other gains, so an expectation is a range over the measured corpora. `LEAVES_OUT` lists what it
does not cover.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from privmix.engine import PartKind
from privmix.foundation.errors import InputError
from privmix.privacy import accounting
from privmix.privacy.events import Accountant, Event
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols.exponential import ExponentialSettings
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.privacy.protocols.pmixed import PMixedSettings
from privmix.privacy.settings import Settings
from privmix.training.options import TokenBudget

TABLE = Path(__file__).with_name("gain.json")
MIN_USERS_PER_PART = 8
"""The minimum average number of users in a part. With 8, one part in 3,000 is empty (the keyed hash is Poisson)."""
MIN_USERS_PER_PART_OF_UNKNOWN_SIZE = 25
"""The same if the size of the corpus is unknown. With 25, the sizes of parts vary by a fifth."""
SAMPLE = 4
"""The number of parts that the exponential mechanism draws for a token, as in the measurements of `gain.json`."""
MEASURED = ("pmixed", "exponential", "individual")
"""The protocols whose gain was measured."""
TOLERANCE = 0.01
"""The relative gain by which a proposal may be worse than the best one, if it has fewer parts or fewer rows."""
# Rényi divergences alone plan in milliseconds, and their radius is at most a twentieth smaller: enough to choose by.
_BY_ORDER = Accountant(float(accounting.ORDERS[-1]))

LEAVES_OUT = (
    "other text and other models: the range covers the measured corpora, not yours",
    "the gain of averaging over more parts than were measured",
    "parts with more text than was measured: they count as the largest measured part",
    "users whose texts are much longer than others', which make parts of unequal size",
)
PLAIN_LORA = "the gain of plain LoRA, which was not measured: it counts as a reader's"


@dataclass(frozen=True)
class Range:
    """Holds the smallest, the mean and the largest of several measurements."""

    low: float
    mean: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(min(values), sum(values) / len(values), max(values))


@dataclass(frozen=True)
class Population:
    """Describes the size of a corpus: its users and, if known, its tokens."""

    users: int
    tokens: int | None = None


@dataclass(frozen=True)
class Requirements:
    """States what is known before training. `propose` chooses what is None.

    Attributes:
        protocol: a measured protocol, one of `MEASURED`. Individual budgets are proposed only if they are named,
            because a token asks all parts.
        parts: N, the number of parts.
        part_kind: what a part is; by default a reader or a text, and a reader if the size of the corpus is unknown.
        base: the training of a private base, which the budget pays besides the tokens; None without a base.
    """

    population: Population
    budget: TokenBudget
    protocol: str | None = None
    parts: int | None = None
    part_kind: PartKind | None = None
    base: Event | None = None

    def check(self) -> None:
        """Raises `InputError` if a value is out of range."""
        population, protocol, parts = self.population, self.protocol, self.parts
        if population.users < 1:
            raise InputError(f"users: must be at least 1, not {population.users}")
        if population.tokens is not None and population.tokens < 1:
            raise InputError(f"corpus-tokens: must be at least 1, not {population.tokens}")
        if protocol not in (None, *MEASURED):
            raise InputError(
                f"protocol: the gain of {protocol} was not measured; use {', '.join(MEASURED)}, or --parts"
            )
        if parts is not None and not 1 <= parts <= population.users:
            raise InputError(f"parts: must be from 1 to the {population.users} users, not {parts}")

    @property
    def kinds(self) -> Sequence[PartKind]:
        """The kinds of parts to consider, the cheaper first."""
        if self.part_kind is not None:
            return (self.part_kind,)
        return ("reader", "text") if self.population.tokens else ("reader",)


@dataclass(frozen=True)
class Proposal:
    """Holds a protocol for a number of parts and its expected gain.

    Attributes:
        part_kind: what a part is.
        kept: the fraction of the ensemble's gain, in nats per token, that the protocol keeps.
        by_corpus: the gain over the public model on each measured corpus, in nats per token; empty if the size of the
            corpus is unknown.
    """

    part_kind: PartKind
    settings: Settings
    protocol: Protocol
    kept: Range
    by_corpus: Mapping[str, float]

    @property
    def gain(self) -> Range | None:
        """The gain over the public model, in nats per token; None if the size of the corpus is unknown."""
        return Range.of([*self.by_corpus.values()]) if self.by_corpus else None

    @property
    def radius(self) -> float:
        """The most that a part changes a token's log-probability, in nats, or what compares with it."""
        return _radius(self.protocol)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The parameters of the protocol besides the radius and the budget, chosen or derived from it."""
        derived = {name: value for name, value in self.settings.details(self.protocol).items() if name != "radius"}
        return self.settings.model_dump(include={"q", "sample"}) | derived

    @property
    def worth(self) -> float:
        """The number by which proposals are compared."""
        return (self.gain or self.kept).mean


class Measured:
    """Reads the curves of one kind of parts from `gain.json`, one for each corpus and held-out text."""

    def __init__(self, table: Mapping[str, Any], part_kind: PartKind) -> None:
        self._table = table
        self._kind = table["part_kind"]["text" if part_kind == "text" else "reader"]

    @classmethod
    @cache
    def load(cls, part_kind: PartKind) -> Self:
        return cls(json.loads(TABLE.read_bytes()), part_kind)

    def kept(self, protocol: str, radius: float) -> list[float]:
        """Returns the fraction of the ensemble's gain that a protocol keeps at a radius, for each measurement."""
        return self._at(radius, [corpus["kept"][protocol] for corpus in self._corpora])

    def gain(self, part_tokens: float) -> list[float]:
        """Returns the gain of a part of `part_tokens` tokens, in nats per token, for each measurement.

        By Jensen's inequality, the mean gain of the parts is at most the gain of the mean of their distributions. So it
        underestimates the ensemble's gain.
        """
        return self._at(part_tokens, [corpus["gain_by_part_tokens"] for corpus in self._corpora])

    def by_corpus(self, values: Sequence[float]) -> dict[str, float]:
        """Returns the means of one value for each measurement."""
        names = [name for name, corpus in self._kind["corpora"].items() for _ in corpus["ensemble_gain"]]
        return {
            name: float(np.mean([value for other, value in zip(names, values, strict=True) if other == name]))
            for name in dict.fromkeys(names)
        }

    @property
    def _corpora(self) -> Sequence[Any]:
        return list(self._kind["corpora"].values())

    def source(self, protocol: str) -> str:
        """Returns the source of a protocol's expectations in one sentence."""
        table, kind = self._table, self._kind
        computed = kind.get("computed", {}).get(protocol)
        return (
            f"measured {table['measured']} on {', '.join(kind['corpora'])}, {table['held_out_tokens']:,} held-out "
            f"tokens each, with {table['model']} and {table['parts']} parts of {kind['part_tokens']:,} tokens: "
            "services/privmix/training/gain.json; python -m tests.benchmarks.gain repeats it"
            + ("" if computed is None else f". What {protocol} keeps is not measured yet: it is {computed}")
        )

    @staticmethod
    def _at(value: float, curves: Sequence[dict[str, Sequence[float]]]) -> list[float]:
        """Returns the value of every measurement's curve."""
        return [
            interpolated(value, {key: runs[run] for key, runs in curve.items()})
            for curve in curves
            for run in range(len(next(iter(curve.values()))))
        ]


def interpolated(place: float, curve: Mapping[str, float], at_0: float = 0.0) -> float:
    """Interpolates a measured curve linearly, from its value at 0; it is flat after the last measurement."""
    return float(np.interp(place, [0.0, *map(float, curve)], [at_0, *curve.values()]))


def propose(wanted: Requirements, *, roughly: bool = False) -> Proposal:
    """Proposes the fewest parts and the protocol with the fewest rows whose expected gain is near the best.

    Near means within `TOLERANCE`. If no protocol is required, it searches the number of parts with PMixED, whose radius
    is fast to plan; the best number for the exponential mechanism is nearly the same.

    Args:
        roughly: plan by Rényi divergences alone, for a comparison of many: exact composition takes seconds.

    Raises:
        InputError: no choice meets the requirements. The message names the field and the reason.
    """
    wanted.check()
    best = _cheapest([_propose(wanted, kind) for kind in wanted.kinds])
    if roughly:
        return best
    return _expect(best.part_kind, best.settings.protocol, best.protocol.parts, wanted, None) or best


def _propose(wanted: Requirements, part_kind: PartKind) -> Proposal:
    population, budget = wanted.population, wanted.budget
    sizes = list(candidates(population)) if wanted.parts is None else [wanted.parts]
    proposals = [_expect(part_kind, wanted.protocol or "pmixed", size, wanted) for size in sizes]
    possible = [proposal for proposal in proposals if proposal is not None]
    if not possible:
        raise InputError(
            f"tokens: epsilon {accounting.stated(budget.epsilon)} at delta {budget.delta:g} does not last for "
            f"{budget.tokens:,} tokens with {sizes[-1]:,} parts; plan fewer tokens, or use a corpus with more users"
        )
    best = _cheapest(possible)
    if wanted.protocol is not None:
        return best
    other = _expect(part_kind, "exponential", best.protocol.parts, wanted)
    return best if other is None else _cheapest([best, other])


def candidates(population: Population) -> Iterator[int]:
    """Yields the numbers of parts to consider: 2, 3, 4, 6, 8, 12, ..., while parts have enough users; 1 for one user.

    The list is coarse, so that a size that is stated roughly gives the same number of parts.
    """
    users = population.users
    per_part = MIN_USERS_PER_PART_OF_UNKNOWN_SIZE if population.tokens is None else MIN_USERS_PER_PART
    most = max(min(2, users), users // per_part)
    if most < 2:
        yield 1
    size = 2
    while size <= most:
        yield size
        if 3 * size // 2 <= most:
            yield 3 * size // 2
        size *= 2


def _cheapest(choices: Sequence[Proposal]) -> Proposal:
    """Returns the first choice within the tolerance of the best. The choices must be in ascending order of cost."""
    best = max(choice.worth for choice in choices)
    return next(choice for choice in choices if choice.worth >= (1 - TOLERANCE) * best)


@lru_cache(maxsize=128)
def _planned(
    protocol: str, parts: int, budget: TokenBudget, base: Event | None, kept: Accountant | None
) -> tuple[Settings, Protocol] | None:
    """Returns a protocol's settings and plan, which are the same for adapters and texts; None if the budget ends."""
    settings = _settings(protocol, parts, budget.model_dump()).on_base(base)
    try:
        return settings, settings.plan(parts, kept)
    except ValueError:
        return None


def _settings(protocol: str, parts: int, limits: Mapping[str, Any]) -> Settings:
    match protocol:
        case "pmixed":
            # Its token distribution is a mean over all parts; q only sets how often the public model answers alone.
            return PMixedSettings(q=1.0, **limits)
        case "exponential":
            return ExponentialSettings(sample=min(SAMPLE, parts), **limits)
        case _:
            return IndividualSettings(**limits)


def _radius(protocol: Protocol) -> float:
    return float(getattr(protocol, "radius"))  # noqa: B009


def _expect(
    part_kind: PartKind,
    protocol: str,
    parts: int,
    wanted: Requirements,
    kept: Accountant | None = _BY_ORDER,
) -> Proposal | None:
    """Returns the proposal for a number of parts; None if the budget does not last."""
    chosen = _planned(protocol, parts, wanted.budget, wanted.base, kept)
    if chosen is None:
        return None
    settings, planned = chosen
    measured = Measured.load(part_kind)
    fractions = measured.kept(protocol, _radius(planned))
    tokens, by_corpus = wanted.population.tokens, {}
    if tokens is not None:
        # The pairs are kept together: the more a text differs from public text, the larger is the gain and the smaller
        # is the fraction that a radius keeps.
        gains = measured.gain(tokens / parts)
        by_corpus = measured.by_corpus([fraction * nats for fraction, nats in zip(fractions, gains, strict=True)])
    return Proposal(part_kind, settings, planned, Range.of(fractions), by_corpus)
