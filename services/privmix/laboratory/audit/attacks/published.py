"""Computes the cost of PMixED as published in the worst known case, beside its claim.

The mollifier bounds the Rényi divergence at one order. Theorem 5.1 of Flemings et al. 2024 concludes from it a bound on
the divergence between two means; that step needs the bound at every order. So two part models may both lie in the ball
and still be far apart: on a token that is rare under p0, the ball lets one part raise the token's probability by a
large factor, and the other parts lower it by a larger factor.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from privmix.laboratory.audit.attacks import likelihood
from privmix.laboratory.audit.report.finding import Finding
from privmix.laboratory.audit.worlds import distributions
from privmix.privacy.accounting import published
from privmix.privacy.arrays import Reals
from privmix.privacy.protocols.pmixed import PMixed, PMixedSettings, PublishedEvent
from privmix.privacy.worlds import Pair, removed

# The probabilities of the rare token to try; the service keeps tokens down to 2**-36.
_RARE = 2.0 ** -np.arange(8.0, 35.5, 1.5)
# The factor that keeps the parts inside the ball after rounding to float32.
_INSIDE = 1 - 1e-4
# The Rényi order of the published accounting.
_ORDER = 3


@dataclass(frozen=True)
class Counterexample:
    """A pair of ensembles for the published mollifier.

    Attributes:
        pair: the ensembles with and without the attacked part.
        rare: the probability under p0 of the token that distinguishes the ensembles.
        divergence: the Rényi divergence of one token at the published order.
        epsilon: the epsilon of all tokens at the claim's delta.
    """

    pair: Pair
    rare: float
    divergence: float
    epsilon: float


def against(protocol: PMixed, tokens: int, delta: float) -> Counterexample:
    """Returns the counterexample with the largest epsilon over the probabilities of the rare token."""
    event = published_event(protocol)
    counterexamples = [_counterexample(protocol, event, float(rare), tokens, delta) for rare in _RARE]
    return max(counterexamples, key=lambda counterexample: counterexample.epsilon)


def compare(parts: int, q: float, epsilon: float, delta: float, tokens: int) -> tuple[Finding, Finding]:
    """Compares the published and the certified mollifier at the same budget, each in its worst known case.

    Raises:
        ValueError: the budget leaves nothing to spend at this order.
    """
    settings = {"q": q, "epsilon": epsilon, "delta": delta, "tokens": tokens}
    as_published = PMixedSettings(mollifier="renyi", order=_ORDER, **settings).plan(parts)
    certified = PMixedSettings(**settings).plan(parts)
    worst = against(as_published, tokens, delta)
    ours = likelihood.exact(certified, tokens=tokens, delta=delta)
    shared = {"tokens": tokens, "parts": parts, "q": q}
    return (
        _finding(
            as_published,
            {f"Theorem 5.1 at order {_ORDER}": epsilon},
            delta,
            worst.epsilon,
            {
                **shared,
                "rare_token": worst.rare,
                "token_divergence_claimed": published_event(as_published).loss,
                "token_divergence": worst.divergence,
            },
        ),
        _finding(certified, likelihood.claims_of(certified.event, tokens, delta), delta, ours, shared),
    )


def published_event(protocol: PMixed) -> PublishedEvent:
    """Returns the event of a token by the published accounting.

    Raises:
        ValueError: the protocol has the other mollifier.
    """
    if not isinstance(protocol.event, PublishedEvent):
        raise ValueError("mollifier must be renyi")
    return protocol.event


def smallest_beta(protocol: PMixed) -> float:
    """Returns the smallest radius over all draw sizes: no draw changes a distribution inside this ball."""
    event, drawn = published_event(protocol), range(1, protocol.parts + 1)
    return min(published.largest_beta(event.order, event.q, count, event.loss) for count in drawn)


def _finding(
    protocol: PMixed, claims: Mapping[str, float], delta: float, epsilon: float, details: Mapping[str, float]
) -> Finding:
    return Finding(
        attack="constructed pair",
        subject=f"pmixed, mollifier {protocol.mollifier}",
        status=protocol.guarantee.status,
        claims=claims,
        delta=delta,
        lower=epsilon,
        confidence=1.0,
        certain=epsilon,
        exact=epsilon,
        details=details,
    )


def _counterexample(protocol: PMixed, event: PublishedEvent, rare: float, tokens: int, delta: float) -> Counterexample:
    """Returns the pair in which one part makes the rare token as likely, and the others as rare, as the ball allows."""
    ball = _INSIDE * event.order * smallest_beta(protocol)
    likely, unlikely = (_on_the_ball(rare, ball, event.order, sign) for sign in (1, -1))
    pair = removed(_two(rare), np.stack([_two(unlikely), _two(likely)]), (0,) * (protocol.parts - 1) + (1,))
    before, after = distributions.pair_laws(protocol, pair)
    divergence = distributions.renyi_divergence(before, after, event.order)
    return Counterexample(pair, rare, divergence, distributions.tokens_epsilon(before, after, tokens, delta))


def _on_the_ball(rare: float, ball: float, order: float, sign: int) -> float:
    """Returns the largest (smallest for sign -1) probability of the rare token inside the ball, in both directions."""

    def excess(log_factor: float) -> float:
        p = rare * np.exp(sign * log_factor)
        return distributions.renyi_divergence(np.array([p, 1 - p]), np.array([rare, 1 - rare]), order) - ball

    most = min(60.0, np.log(0.5 / rare)) if sign > 0 else 60.0
    factor = most if excess(most) <= 0 else brentq(excess, 0.0, most, xtol=1e-12)
    return float(rare * np.exp(sign * factor))


def _two(first: float) -> Reals:
    return np.array([np.log(first), np.log1p(-first)])
