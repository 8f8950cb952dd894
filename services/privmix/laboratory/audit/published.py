"""Computes the cost of PMixED as published in the worst known case, beside its claim.

The mollifier bounds the Rényi divergence at one order. Theorem 5.1 of Flemings et al. 2024 concludes from it a bound on
the divergence between two means; that step needs the bound at every order. So two part models may both lie in the ball
and still be far apart: on a token that is rare under p0, the ball lets one part raise the token's probability by a
large factor, and the other parts lower it by a larger factor. The
ball depends on the number of drawn parts. So the models lie outside all balls, and the mollifier itself moves them to
the border of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from privmix.laboratory.audit import distributions, likelihood
from privmix.laboratory.audit.finding import Finding
from privmix.privacy.arrays import Reals
from privmix.privacy.protocols.pmixed import PMixed, PMixedSettings, PublishedEvent
from privmix.privacy.worlds import Pair, removed

# The probabilities of the rare token to try; the service keeps tokens down to 2**-36.
_RARE = 2.0 ** -np.arange(6.0, 36.0)
# The probability of the rare token under the attacked part, and its logarithm under others that avoid it.
_LIKELY, _UNLIKELY = 0.5, -40.0
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
    """Returns the counterexample with the largest epsilon over the probabilities of the rare token.

    Raises:
        ValueError: the protocol has the other mollifier.
    """
    event = _published_event(protocol)
    return max(
        (
            _counterexample(protocol, event, float(rare), others, tokens, delta)
            for rare in _RARE
            for others in (_UNLIKELY, np.log(rare))
        ),
        key=lambda counterexample: counterexample.epsilon,
    )


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
                "token_divergence_claimed": _published_event(as_published).loss,
                "token_divergence": worst.divergence,
            },
        ),
        _finding(certified, likelihood.claims_of(certified.event, tokens, delta), delta, ours, shared),
    )


def _published_event(protocol: PMixed) -> PublishedEvent:
    """Returns the event of a token by the published accounting.

    Raises:
        ValueError: the protocol has the other mollifier.
    """
    if not isinstance(protocol.event, PublishedEvent):
        raise ValueError("mollifier must be renyi")
    return protocol.event


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


def _counterexample(
    protocol: PMixed, event: PublishedEvent, rare: float, others: float, tokens: int, delta: float
) -> Counterexample:
    """Returns the pair in which one part says the rare token often, and the others at a log-probability."""
    rows = np.stack([_two(others), _two(np.log(_LIKELY))])
    pair = removed(_two(np.log(rare)), rows, (0,) * (protocol.parts - 1) + (1,))
    before, after = distributions.pair_laws(protocol, pair)
    divergence = distributions.renyi_divergence(before, after, event.order)
    return Counterexample(pair, rare, divergence, distributions.tokens_epsilon(before, after, tokens, delta))


def _two(log_first: float) -> Reals:
    return np.array([log_first, np.log1p(-np.exp(log_first))])
