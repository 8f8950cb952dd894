"""Runs the likelihood-ratio test, the most powerful test between two worlds (Neyman, Pearson 1933).

The auditor knows both worlds and everything except the randomness, observes the tokens of some queries, and sorts the
trials by log-likelihood ratio. One half of the trials chooses the threshold; the other half bounds epsilon. The tokens
are also compared with their exact distribution in either world. This detects a wrong draw or re-used noise even if it
hardly changes epsilon.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from privmix.laboratory.audit import distributions
from privmix.laboratory.audit.finding import CERTAIN, Finding
from privmix.laboratory.audit.frequencies import refuted, token_counts
from privmix.laboratory.audit.roc import best_test, epsilon_of
from privmix.privacy.accounting import planning
from privmix.privacy.arrays import Reals
from privmix.privacy.events import Event
from privmix.privacy.protocol import Protocol
from privmix.privacy.worlds import Pair

# The largest Rényi order for the comparison of pairs. Larger orders prefer tokens too rare for any number of trials.
_MAX_ORDER = 8.0
# The confidence for the choice of the test, between the two confidences of the evaluation.
_CHOICE_CONFIDENCE = 0.999


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
) -> Finding:
    """Attacks a protocol's claim for a number of tokens.

    Args:
        protocol: the protocol that releases the tokens.
        tokens: the number of tokens in a trial.
        delta: the delta of the claim.
        claimed: the claimed event of a token. Default: the protocol's own event.
        pair: the two worlds. Default: the worst known pair.
        releases: the number of tokens in each world, over all trials; divided by the protocol's `effort`.
        confidence: the confidence of the reported bound.
        subject: the protocol's name in the finding.

    Raises:
        NoPairError: no worst case is known for this protocol.
    """
    event = claimed or protocol.event
    claims = claims_of(event, tokens, delta)
    pair = pair or _worst(protocol, event, tokens, delta)
    before, after = distributions.pair_laws(protocol, pair)
    trials = max(2, releases // protocol.effort // tokens)
    ratio = distributions.log_ratio(before, after)
    samples = [distributions.tokens(protocol, world, trials * tokens) for world in (pair.before, pair.after)]
    described = [distributions.described_law(protocol, world) for world in (pair.before, pair.after)]
    counts = [*token_counts(described[0], samples[0], "before"), *token_counts(described[1], samples[1], "after")]
    first, second = (_scores(ratio[sample], trials, tokens) for sample in samples)
    lower, certain = held_out_epsilons(first, second, delta, (confidence, CERTAIN))
    return Finding(
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


def claims_of(event: Event, tokens: int, delta: float) -> Mapping[str, float]:
    """Returns the claimed epsilon of a number of tokens, by each accountant that has a bound."""
    cost = planning.cost(event, tokens, delta)
    return {"Rényi": cost.epsilon_rdp} | ({} if cost.epsilon_pld is None else {"PLD": cost.epsilon_pld})


def exact(protocol: Protocol, *, tokens: int, delta: float) -> float:
    """Returns the epsilon of the worst known pair, from its exact distributions."""
    pair = _worst(protocol, protocol.event, tokens, delta)
    return distributions.tokens_epsilon(*distributions.pair_laws(protocol, pair), tokens, delta)


def held_out_epsilons(present: Reals, absent: Reals, delta: float, confidences: Sequence[float]) -> list[float]:
    """Bounds epsilon from below. One half of the scores in each world chooses the test; the other gives the bounds."""
    (choosing, measured), (choosing_without, measured_without) = (
        np.array_split(scores, 2) for scores in (present, absent)
    )
    test = best_test(choosing, choosing_without, delta, _CHOICE_CONFIDENCE)
    return [epsilon_of(test, measured, measured_without, delta, confidence) for confidence in confidences]


def _worst(protocol: Protocol, event: Event, tokens: int, delta: float) -> Pair:
    return distributions.worst_pair(protocol, event, min(_MAX_ORDER, planning.cost(event, tokens, delta).best_order))


def _scores(ratios: Reals, trials: int, tokens: int) -> Reals:
    # Rounding makes sums of the same tokens equal in any order; otherwise a threshold could fall between them.
    return np.asarray(np.round(ratios.reshape(trials, tokens).sum(axis=1), 9))
