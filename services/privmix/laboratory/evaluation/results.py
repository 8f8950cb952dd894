"""Holds the results of an evaluation as plain data, for JSON, the tables and the figures."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict

from privmix.laboratory.evaluation.cases import Case
from privmix.laboratory.evaluation.estimate import Estimate
from privmix.laboratory.evaluation.trial import CONTEXTS, MeasuredLosses, TrialResult
from privmix.privacy import accounting
from privmix.privacy.accounting import planning
from privmix.privacy.events import Guarantee
from privmix.privacy.protocol import Protocol
from privmix.privacy.settings import Settings
from privmix.training.options import TokenBudget


@dataclass(frozen=True)
class EpsilonSpent:
    """Holds the epsilon of the evaluated tokens.

    Attributes:
        rdp: from Rényi divergences; None if there is no bound.
        pld: from the privacy loss distribution; None if no dominating pair is known.
        measured: from losses measured on the private text, the largest of all runs, if the budget limits them. Only the
            operator may see it.
        bound: what a ledger counts, which depends on no text; None if there is no bound.
    """

    rdp: float | None = None
    pld: float | None = None
    measured: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class Gain:
    """Holds the gain over the public model at the positions with `first` to `last` tokens before them.

    Attributes:
        positions: the number of them, in all runs.
        gain: in nats a token; None if the method gives a token of the public model's probability 0.
    """

    first: int
    last: int
    positions: int
    gain: Estimate | None


@dataclass(frozen=True)
class Result:
    """Holds the result of one method.

    Attributes:
        ensemble: the name of the ensemble's directory.
        status, sentence: that of its guarantee, and the whole guarantee.
        perplexity: over the runs and the true tokens that the public model can release (`SUPPORT_FLOOR`); no protocol
            releases another one. Infinite if the method gives such a token probability 0.
        possible: the fraction of true tokens with a positive probability.
        answered: the fraction of tokens answered before the budget was used up.
        asked: the average number of part models queried for a token.
        problem: why the settings are impossible. Then there are no numbers.
        base: the epsilon of the private base that the method is on, or is itself; None on the public model.
        gains: over the public model, for each range of `CONTEXTS` with positions.
        losses: the measured ones of the run with the largest. Only the operator may see them.
        bounded: whether the probabilities are upper bounds, so that the perplexity is a lower bound.
    """

    label: str
    protocol: str
    ensemble: str
    parts: int
    parameters: dict[str, Any]
    status: str
    sentence: str
    perplexity: Estimate | None = None
    possible: float | None = None
    answered: float | None = None
    asked: float | None = None
    reached: EpsilonSpent = EpsilonSpent()
    problem: str | None = None
    base: float | None = None
    gains: tuple[Gain, ...] = ()
    losses: MeasuredLosses | None = None
    bounded: bool = False

    @property
    def name(self) -> str:
        """The method's label, and the private base that it is on."""
        if self.base is None:
            return self.label
        return f"{self.label}, {'as' if self.protocol == 'dp-sgd' else 'on'} a base of epsilon {self.base:g}"


def result(
    label: str,
    case: Case,
    outcomes: Sequence[TrialResult],
    public: Sequence[TrialResult],
    guarantee: Guarantee,
    base: float | None = None,
) -> Result:
    """Computes a result from the outcomes of all runs and the public model's outcomes on the same positions.

    Args:
        base: see `Result`.
    """
    settings, protocol = case.settings, case.protocol
    positions = sum(outcome.positions for outcome in outcomes)
    possible = sum(outcome.possible for outcome in outcomes) / positions
    losses = [outcome.loss for outcome in outcomes]
    everywhere = all(own.possible >= reference.possible for own, reference in zip(outcomes, public, strict=True))
    spent = max(outcome.charged for outcome in outcomes)
    cost = reached(settings, protocol, spent, outcomes)
    return Result(
        label=label,
        protocol=protocol.name,
        ensemble=case.ensemble,
        parts=protocol.parts,
        parameters=parameters(settings, protocol),
        status=guarantee.status,
        sentence=settings.sentence(guarantee, cost.bound, spent) + _paid_for(settings, protocol, base),
        perplexity=Estimate.of_logarithms(losses) if everywhere else _infinite(len(outcomes)),
        possible=possible,
        answered=sum(outcome.answered for outcome in outcomes) / positions,
        asked=sum(outcome.asked for outcome in outcomes) / len(outcomes),
        reached=cost,
        base=base,
        gains=tuple(_gains(outcomes, public)),
        losses=max((each.losses for each in outcomes if each.losses), key=lambda own: own.quarters[-1], default=None),
        bounded=type(protocol).chance_bounds is not Protocol.chance_bounds,
    )


def _gains(outcomes: Sequence[TrialResult], public: Sequence[TrialResult]) -> Iterator[Gain]:
    by_range = zip(*(outcome.contexts for outcome in outcomes), strict=True)
    of_public = zip(*(outcome.contexts for outcome in public), strict=True)
    for (first, last), own, reference in zip(CONTEXTS, by_range, of_public, strict=False):
        counts = [count for count, _ in reference]
        if not sum(counts):
            continue
        everywhere = all(count >= expected for (count, _), expected in zip(own, counts, strict=True))
        differences = [before - after for (_, after), (_, before) in zip(own, reference, strict=True)]
        yield Gain(first, last, sum(counts), Estimate.of_ratio(differences, counts) if everywhere else None)


def impossible(
    label: str, ensemble: str, settings: Settings, parts: int, problem: str, base: float | None = None
) -> Result:
    """Returns the result of settings that the budget or the ensemble does not allow. `base`: see `Result`."""
    return Result(label, settings.protocol, ensemble, parts, {}, "none", "", problem=problem, base=base)


def reached(settings: Settings, protocol: Protocol, tokens: int, outcomes: Sequence[TrialResult]) -> EpsilonSpent:
    """Computes the cost of a number of tokens with every accountant that supports the protocol."""
    epsilons = [outcome.epsilon for outcome in outcomes if outcome.epsilon is not None]
    measured = max(epsilons) if protocol.event.measured and settings.enforced == "measured" and epsilons else None
    # The cost of published methods is known at only one order.
    orders = accounting.ORDERS if protocol.order is None or protocol.event.measured else [protocol.order]
    if not any(map(math.isfinite, protocol.event.rdp(orders))):
        return EpsilonSpent(measured=measured)
    cost = planning.cost(protocol.event, tokens, settings.delta, orders, before=settings.spent_before)
    return EpsilonSpent(cost.epsilon_rdp, cost.epsilon_pld, measured, cost.epsilon)


def parameters(settings: Settings, protocol: Protocol) -> dict[str, Any]:
    """Returns the chosen parameters and those derived from the budget, without parameters that have no effect."""
    own = {name for name in type(settings).model_fields if name not in Settings.model_fields}
    chosen = {name: getattr(settings, name) for name in sorted(own)}
    derived = {name: getattr(protocol, name) for name in sorted(own) if hasattr(protocol, name)}
    return {name: value for name, value in (chosen | derived).items() if value is not None}


def _paid_for(settings: Settings, protocol: Protocol, base: float | None) -> str:
    """Returns a sentence on what a private base costs; empty without one, or where it is the whole cost."""
    if base is None or protocol.name in ("dp-sgd", "ensemble"):
        return ""
    if settings.spent_before:
        return f" The training of the private base, epsilon {accounting.stated(base)} alone, is part of it."
    return f" A person pays for the private base, epsilon {accounting.stated(base)}, or for the tokens, not for both."


def _infinite(runs: int) -> Estimate:
    return Estimate(math.inf, None, None, (math.inf,) * runs)


@dataclass(frozen=True)
class ResultTable:
    """Holds the results of all methods at one budget: references, methods of the main ensemble, other ensembles.

    Attributes:
        value: the value of the swept field; None without a sweep.
    """

    value: str | None
    budget: TokenBudget
    results: tuple[Result, ...]


@dataclass(frozen=True)
class Evaluation:
    """Holds all results of an evaluation.

    Attributes:
        positions: the number of tokens in a run.
        runs: the number of runs.
        apart: whether the runs share no text.
        sweep: the swept field; None without a sweep.
    """

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings")
    positions: int
    runs: int
    apart: bool
    context: int
    base_model: str
    sweep: str | None
    tables: tuple[ResultTable, ...]
