"""What tokens of PMixED as published cost in the worst case that is known, beside what is claimed for them.

Theorem 5.1 of Flemings et al. 2024 concludes from a bound on the Rényi divergence at one order, which is what the
mollifier enforces, to the divergence between two means; that step needs the bound at every order. So two part models
may both lie in the ball and still be far apart: on a token that is rare under p0 the ball allows a part to be likelier
by a large factor, and the others rarer by a larger one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from services.audit.attacks import likelihood
from services.audit.report.finding import Finding
from services.audit.worlds import distributions
from services.privacy.accounting import published
from services.privacy.protocols.pmixed import PMixed, PMixedSettings, PublishedEvent
from services.privacy.worlds import Pair, Reals, removed

# Probabilities of the rare token that are tried; the service keeps tokens down to 2**-36.
_RARE = 2.0 ** -np.arange(8.0, 35.5, 1.5)
# How much inside the ball, so that float32 leaves the parts there.
_INSIDE = 1 - 1e-4


@dataclass(frozen=True)
class Counterexample:
    """A pair of ensembles for the published mollifier.

    Attributes:
        pair: with and without the part in question.
        rare: p0 of the token that tells them apart.
        divergence: of one token, at the published order.
        epsilon: of all tokens, at the claim's delta.
    """

    pair: Pair
    rare: float
    divergence: float
    epsilon: float


def against(protocol: PMixed, tokens: int, delta: float) -> Counterexample:
    """The counter-example that costs the most, over how rare the token is."""
    event = published_event(protocol)
    found = [_counterexample(protocol, event, float(rare), tokens, delta) for rare in _RARE]
    return max(found, key=lambda each: each.epsilon)


def compare(parts: int, q: float, epsilon: float, delta: float, tokens: int, order: int = 3) -> tuple[Finding, Finding]:
    """The published and the certified mollifier at the same budget, each in its worst case that is known.

    Raises:
        ValueError: the budget leaves nothing to spend at this order.
    """
    settings = {"q": q, "epsilon": epsilon, "delta": delta, "tokens": tokens}
    as_published = PMixedSettings(mollifier="renyi", order=order, **settings).plan(parts)
    certified = PMixedSettings(**settings).plan(parts)
    worst = against(as_published, tokens, delta)
    ours = likelihood.exact(certified, tokens=tokens, delta=delta)
    shared = {"tokens": tokens, "parts": parts, "q": q}
    return (
        _finding(
            as_published,
            {f"Theorem 5.1 at order {order}": epsilon},
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
    """What the published accounting says of a token.

    Raises:
        ValueError: the protocol has the other mollifier.
    """
    if not isinstance(protocol.event, PublishedEvent):
        raise ValueError("mollifier must be renyi")
    return protocol.event


def smallest_beta(protocol: PMixed) -> float:
    """Of all numbers of parts that may be drawn: what lies in this ball is left as it is, whatever the draw."""
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
    """The part in question makes the rare token as likely, the others make it as rare, as the ball allows."""
    ball = _INSIDE * event.order * smallest_beta(protocol)
    likely, unlikely = (_on_the_ball(rare, ball, event.order, sign) for sign in (1, -1))
    pair = removed(_two(rare), np.stack([_two(unlikely), _two(likely)]), (0,) * (protocol.parts - 1) + (1,))
    before, after = distributions.pair_laws(protocol, pair)
    divergence = distributions.renyi_divergence(before, after, event.order)
    return Counterexample(pair, rare, divergence, distributions.tokens_epsilon(before, after, tokens, delta))


def _on_the_ball(rare: float, ball: float, order: float, sign: int) -> float:
    """The largest (or smallest) probability of the rare token with both Rényi divergences to p0 within the ball."""

    def excess(log_factor: float) -> float:
        p = rare * np.exp(sign * log_factor)
        return distributions.renyi_divergence(np.array([p, 1 - p]), np.array([rare, 1 - rare]), order) - ball

    most = min(60.0, np.log(0.5 / rare)) if sign > 0 else 60.0
    factor = most if excess(most) <= 0 else brentq(excess, 0.0, most, xtol=1e-12)
    return float(rare * np.exp(sign * factor))


def _two(first: float) -> Reals:
    return np.array([np.log(first), np.log1p(-first)])
