"""What an evaluation found, as plain data: for JSON, for the table and for the figures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.evaluation.estimate import Estimate
from services.evaluation.methods import Budget, Quantity
from services.evaluation.trial import Outcome
from services.privacy import accounting
from services.privacy.accounting import planning
from services.privacy.protocol import Protocol
from services.privacy.settings import Settings


@dataclass(frozen=True)
class Reached:
    """What the evaluated tokens cost.

    Attributes:
        rdp: epsilon from Rényi divergences; None where there is no bound.
        pld: from the privacy loss distribution; None where no dominating pair is known.
        measured: where the budget limits losses measured on the private text: what they came to, the largest of all
            runs. For the operator alone.
    """

    rdp: float | None = None
    pld: float | None = None
    measured: float | None = None


@dataclass(frozen=True)
class Result:
    """One method.

    Attributes:
        status, notion, adjacency, sentence: of its guarantee: how far it reaches, what epsilon measures, which two
            corpora it is about, and all of it in words.
        perplexity: over the runs; infinite where a token that occurred could not have been released.
        possible: the share of tokens that could, and `possible_perplexity` theirs alone.
        change: of perplexity from the public model's on the same tokens: 0.8 is a fifth less.
        hits: the chance that the token released is the one that stood there.
        answered: the share of tokens answered before the budget ended.
        asked: part models asked for a token, on average.
        problem: why these settings cannot be had; there are no numbers then.
    """

    label: str
    protocol: str
    parts: int
    parameters: dict[str, Any]
    status: str
    notion: str
    adjacency: str
    sentence: str
    perplexity: Estimate | None = None
    possible: float | None = None
    possible_perplexity: Estimate | None = None
    change: Estimate | None = None
    hits: Estimate | None = None
    answered: float | None = None
    asked: float | None = None
    reached: Reached = Reached()
    problem: str | None = None


def result(
    label: str, settings: Settings, protocol: Protocol, outcomes: Sequence[Outcome], public: Sequence[Outcome]
) -> Result:
    """From the outcomes of all runs, and those of the public model on the same positions."""
    possible = sum(each.possible for each in outcomes) / sum(each.positions for each in outcomes)
    losses = [each.loss for each in outcomes]
    everywhere = possible == 1
    spent = max(each.charged for each in outcomes)
    cost = reached(settings, protocol, spent, outcomes)
    return Result(
        label=label,
        protocol=protocol.name,
        parts=protocol.parts,
        parameters=parameters(settings, protocol),
        status=protocol.guarantee.status,
        notion=protocol.guarantee.notion,
        adjacency=protocol.guarantee.adjacency,
        sentence=_sentence(settings, protocol, cost, spent),
        perplexity=Estimate.of_logarithms(losses) if everywhere else _infinite(len(outcomes)),
        possible=possible,
        possible_perplexity=Estimate.of_logarithms(losses) if possible > 0 else None,
        change=(
            Estimate.of_logarithms([own.loss - other.loss for own, other in zip(outcomes, public, strict=True)])
            if everywhere
            else None
        ),
        hits=Estimate.of([each.hits for each in outcomes]),
        answered=sum(each.answered for each in outcomes) / sum(each.positions for each in outcomes),
        asked=sum(each.asked for each in outcomes) / len(outcomes),
        reached=cost,
    )


def impossible(label: str, settings: Settings, parts: int, problem: str) -> Result:
    """For settings that the budget or the ensemble does not allow."""
    return Result(
        label=label,
        protocol=settings.protocol,
        parts=parts,
        parameters={},
        status="none",
        notion="",
        adjacency="",
        sentence="",
        problem=problem,
    )


def reached(settings: Settings, protocol: Protocol, tokens: int, outcomes: Sequence[Outcome]) -> Reached:
    """What so many tokens cost, by every accountant that knows the protocol."""
    epsilons = [each.epsilon for each in outcomes if each.epsilon is not None]
    measured = max(epsilons) if protocol.event.measured and settings.enforced == "measured" and epsilons else None
    # The cost of published methods is known at one order alone.
    orders = accounting.ORDERS if protocol.order is None or protocol.event.measured else [protocol.order]
    if not any(map(math.isfinite, protocol.event.rdp(orders))):
        return Reached(measured=measured)
    cost = planning.cost(protocol.event, tokens, settings.delta, orders)
    return Reached(cost.epsilon_rdp, cost.epsilon_pld, measured)


def parameters(settings: Settings, protocol: Protocol) -> dict[str, Any]:
    """What was chosen and what follows from the budget, without what the protocol does not use."""
    own = {name for name in type(settings).model_fields if name not in Settings.model_fields}
    chosen = {name: getattr(settings, name) for name in sorted(own)}
    derived = {name: getattr(protocol, name) for name in sorted(own) if hasattr(protocol, name)}
    return {name: value for name, value in (chosen | derived).items() if value is not None}


def _sentence(settings: Settings, protocol: Protocol, cost: Reached, tokens: int) -> str:
    if settings.enforced == "bound" and cost.rdp is not None:
        return protocol.guarantee.sentence(accounting.shown(cost.rdp), settings.delta, tokens)
    epsilon = "unbounded" if settings.epsilon is None else f"{settings.epsilon:g}"
    return protocol.guarantee.sentence(epsilon, settings.delta, None)


def _infinite(runs: int) -> Estimate:
    return Estimate(math.inf, None, None, (math.inf,) * runs)


@dataclass(frozen=True)
class Table:
    """All methods at one budget, those without privacy first."""

    budget: Budget
    results: tuple[Result, ...]


@dataclass(frozen=True)
class SweepPoint:
    """One value of what a sweep varies."""

    value: float
    result: Result


@dataclass(frozen=True)
class SweepResult:
    """Perplexity against one quantity; `references` are the lines that do not depend on it."""

    quantity: Quantity
    budget: Budget
    points: tuple[SweepPoint, ...]
    references: tuple[Result, ...]


@dataclass(frozen=True)
class Evaluation:
    """Everything that was found.

    Attributes:
        positions: tokens of a run; `runs` of them, which share no text where `apart`.
        parts: of the main ensemble.
        sweep_runs: how many of the runs the sweeps took.
    """

    documents: int
    users: int
    positions: int
    runs: int
    apart: bool
    context: int
    parts: int
    halves: bool
    base_model: str
    tables: tuple[Table, ...]
    sweep_runs: int
    sweeps: tuple[SweepResult, ...]
