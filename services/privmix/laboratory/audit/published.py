"""Computes the cost of PMixED as published in the worst known case, beside its claim.

The mollifier bounds the Rényi divergence at one order. Theorem 5.1 of Flemings et al. 2024 concludes from it a bound on
the divergence between two means; that step needs the bound at every order. So two part models may both lie in the ball
and still be far apart: on a token that is rare under p0, the ball lets one part raise the token's probability by a
large factor, and the other parts lower it by a larger factor. The
ball depends on the number of drawn parts. So the models lie outside all balls, and the mollifier itself moves them to
the border of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from privmix.laboratory.audit import distributions
from privmix.laboratory.audit.worlds import removed, worst_of_pmixed
from privmix.privacy.accounting import planning
from privmix.privacy.arrays import Reals
from privmix.privacy.protocols.pmixed import PMixed, PMixedSettings, PublishedEvent

SETTINGS: Sequence[tuple[int, float]] = ((2, 1.0), (8, 1.0), (80, 1.0), (80, 0.1), (80, 0.03))
"""The numbers of parts and values of q to compare; the last pair is the paper's."""

# The probabilities of the rare token to try; the service keeps tokens down to 2**-36.
_RARE = 2.0 ** -np.arange(6.0, 36.0)
# The probability of the rare token under the attacked part, and its logarithm under others that avoid it.
_LIKELY, _UNLIKELY = 0.5, -40.0
# The Rényi order of the published accounting.
_ORDER = 3


@dataclass(frozen=True)
class Counterexample:
    """What a pair of ensembles costs under the published mollifier.

    Attributes:
        divergence: the Rényi divergence of one token at the published order.
        epsilon: the epsilon of all tokens at the claim's delta.
    """

    divergence: float
    epsilon: float


@dataclass(frozen=True)
class PublishedCost:
    """The published and the certified mollifier at one budget, each in its worst known case.

    Attributes:
        claimed, reached: the epsilon of all tokens by Theorem 5.1, and that of the counterexample.
        token_claimed, token_reached: the Rényi divergence of one token at order 3, likewise.
        certified_claimed, certified_reached: the epsilon of the certified mollifier, and that of its worst pair.
    """

    parts: int
    q: float
    tokens: int
    claimed: float
    reached: float
    token_claimed: float
    token_reached: float
    certified_claimed: float
    certified_reached: float


def compare(parts: int, q: float, epsilon: float, delta: float, tokens: int) -> PublishedCost:
    """Compares both mollifiers at the same budget.

    Raises:
        ValueError: the budget leaves nothing to spend at this order.
    """
    budget = {"q": q, "epsilon": epsilon, "delta": delta, "tokens": tokens}
    as_published = PMixedSettings(mollifier="renyi", order=_ORDER, **budget).plan(parts)
    certified = PMixedSettings(**budget).plan(parts)
    assert certified.radius is not None
    worst = against(as_published, tokens, delta)
    laws = distributions.pair_laws(certified, worst_of_pmixed(parts, q, certified.radius))
    return PublishedCost(
        parts=parts,
        q=q,
        tokens=tokens,
        claimed=epsilon,
        reached=worst.epsilon,
        token_claimed=_published_event(as_published).loss,
        token_reached=worst.divergence,
        certified_claimed=planning.cost(certified.event, tokens, delta).epsilon,
        certified_reached=distributions.tokens_epsilon(*laws, tokens, delta),
    )


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


def _published_event(protocol: PMixed) -> PublishedEvent:
    if not isinstance(protocol.event, PublishedEvent):
        raise ValueError("mollifier must be renyi")
    return protocol.event


def _counterexample(
    protocol: PMixed, event: PublishedEvent, rare: float, others: float, tokens: int, delta: float
) -> Counterexample:
    """Returns the pair in which one part says the rare token often, and the others at a log-probability."""
    rows = np.stack([_two(others), _two(np.log(_LIKELY))])
    pair = removed(_two(np.log(rare)), rows, (0,) * (protocol.parts - 1) + (1,))
    before, after = distributions.pair_laws(protocol, pair)
    divergence = distributions.renyi_divergence(before, after, event.order)
    return Counterexample(divergence, distributions.tokens_epsilon(before, after, tokens, delta))


def _two(log_first: float) -> Reals:
    return np.array([log_first, np.log1p(-np.exp(log_first))])
