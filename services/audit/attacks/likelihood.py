"""The likelihood-ratio test: the strongest there is for telling two worlds apart (Neyman, Pearson 1933).

The auditor knows both worlds and everything but the randomness, sees the tokens of some queries, and orders trials by
the log-likelihood ratio of what it saw. The threshold is chosen on one half of the trials, epsilon is bounded on the
other. The tokens are also compared with their exact law in either world, so that a wrong draw or noise that is used
twice is found out where it changes epsilon too little to see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.audit.attacks.frequencies import refuted, token_counts
from services.audit.report.finding import CERTAIN, Finding
from services.audit.report.roc import Roc, best_test, epsilon_of
from services.audit.worlds import distributions
from services.privacy.accounting import planning
from services.privacy.events import Event
from services.privacy.protocol import Protocol
from services.privacy.worlds import Pair, Reals

# Of the Rényi divergence by which pairs are compared: larger ones find tokens too rare for any number of trials.
_LARGEST_ORDER = 8.0
# Where the test is chosen: between the two confidences at which it is then evaluated.
_CHOSEN_AT = 0.999


@dataclass(frozen=True)
class Audited:
    """A finding and the curve behind it."""

    finding: Finding
    roc: Roc


def audit(
    protocol: Protocol,
    *,
    tokens: int,
    delta: float,
    claimed: Event | None = None,
    pair: Pair | None = None,
    releases: int = 200_000,
    confidence: float = 0.95,
    subject: str | None = None,
) -> Audited:
    """Attack a protocol's claim for some tokens.

    Args:
        protocol: what releases the tokens.
        tokens: how many are seen in a trial.
        delta: of the claim.
        claimed: what is claimed for a token; the protocol's own event unless given.
        pair: the two worlds; the worst ones that are known, unless given.
        releases: how many tokens are released in each world, over all trials; fewer where each is much work.
        confidence: of the bound that is shown.
        subject: what the finding calls the protocol.

    Raises:
        NoPairError: no worst case is known for this protocol.
    """
    event = claimed or protocol.event
    claims = claims_of(event, tokens, delta)
    pair = pair or _worst(protocol, event, tokens, delta)
    before, after = distributions.pair_laws(protocol, pair)
    trials = max(2, releases // protocol.effort // tokens)
    ratio = distributions.log_ratio(before, after)
    seen = [distributions.tokens(protocol, world, trials * tokens) for world in (pair.before, pair.after)]
    described = [distributions.described_law(protocol, world) for world in (pair.before, pair.after)]
    counts = [*token_counts(described[0], seen[0], "before"), *token_counts(described[1], seen[1], "after")]
    first, second = (_scores(ratio[each], trials, tokens) for each in seen)
    lower, certain = held_out_epsilons(first, second, delta, (confidence, CERTAIN))
    finding = Finding(
        attack="likelihood-ratio test",
        subject=subject or protocol.name,
        status=protocol.guarantee.status,
        claims=claims,
        delta=delta,
        lower=lower,
        confidence=confidence,
        certain=certain,
        exact=distributions.tokens_epsilon(before, after, tokens, delta),
        refuted=refuted(counts),
        details={
            "adjacency": event.adjacency,
            "tokens": tokens,
            "trials": trials,
            "parts": protocol.parts,
            "event": event.to_json(),
        },
    )
    return Audited(finding, Roc.of(first, second))


def claims_of(event: Event, tokens: int, delta: float) -> Mapping[str, float]:
    """What is claimed for some tokens, by each accountant that has a bound."""
    cost = planning.cost(event, tokens, delta)
    return {"Rényi": cost.epsilon_rdp} | ({} if cost.epsilon_pld is None else {"PLD": cost.epsilon_pld})


def exact(protocol: Protocol, *, tokens: int, delta: float) -> float:
    """Epsilon of the worst pair that is known, from its exact law."""
    pair = _worst(protocol, protocol.event, tokens, delta)
    return distributions.tokens_epsilon(*distributions.pair_laws(protocol, pair), tokens, delta)


def held_out_epsilons(present: Reals, absent: Reals, delta: float, confidences: Sequence[float]) -> list[float]:
    """Lower bounds on epsilon from scores in either world: one half chooses the test, the other bounds epsilon."""
    (choosing, measured), (choosing_without, measured_without) = (
        np.array_split(scores, 2) for scores in (present, absent)
    )
    test = best_test(choosing, choosing_without, delta, _CHOSEN_AT)
    return [epsilon_of(test, measured, measured_without, delta, confidence) for confidence in confidences]


def _worst(protocol: Protocol, event: Event, tokens: int, delta: float) -> Pair:
    return distributions.worst_pair(
        protocol, event, min(_LARGEST_ORDER, planning.cost(event, tokens, delta).best_order)
    )


def _scores(ratios: Reals, trials: int, tokens: int) -> Reals:
    # Sums of the same tokens in another order must be equal, or a threshold would fall between them.
    return np.asarray(np.round(ratios.reshape(trials, tokens).sum(axis=1), 9))


def describe(audited: Audited) -> dict[str, Any]:
    """The result for programs."""
    return {**audited.finding.record(), "roc": audited.roc.record(), "area": audited.roc.area}
