"""Claim: a pair of ensembles costs more under PMixed as published than its proof claims; the certified one does not.

The published mollifier bounds the Rényi divergence at one order. Theorem 5.1 of Flemings et al. 2024 concludes from it
a bound on the divergence between two means; that step needs the bound at every order. So two part models may both lie
in the ball and still be far apart: on a token that is rare under p0, the ball lets one part raise the token's
probability by a large factor, and the other parts lower it by a larger factor. The ball depends on the number of drawn
parts. So the models lie outside all balls, and the mollifier itself moves them to the border of each.
"""

import numpy as np
import pytest

from privmix.privacy.protocols.pmixed import PMixed, PMixedSettings, PublishedEvent
from tests.support.distributions import renyi_divergence, tokens_epsilon
from tests.support.worlds import Pair, removed
from tests.support.worst_cases import pair_laws, worst_epsilon

DELTA = 1e-5
RARE = 2.0 ** -np.arange(6.0, 36.0)
"""The probabilities of the rare token to try; the service keeps tokens down to 2**-36."""
LIKELY, UNLIKELY = 0.5, -40.0
"""The probability of the rare token under the attacked part, and its logarithm under others that avoid it."""


def as_published(parts: int, q: float, tokens: int) -> PMixed:
    return PMixedSettings(mollifier="renyi", order=3, q=q, tokens=tokens, epsilon=8.0).plan(parts)


def counterexample(parts: int, rare: float, others: float) -> Pair:
    """Returns the pair in which one part says the rare token often, and the others at a log-probability."""
    public, *rows = (np.array([first, np.log1p(-np.exp(first))]) for first in (np.log(rare), others, np.log(LIKELY)))
    return removed(public, np.stack(rows), (0,) * (parts - 1) + (1,))


def costliest(protocol: PMixed, tokens: int) -> tuple[float, float]:
    """Returns the largest epsilon of the tokens, and the Rényi divergence of one of them at the published order."""
    assert isinstance(protocol.event, PublishedEvent)
    pairs = (
        counterexample(protocol.parts, float(rare), others) for rare in RARE for others in (UNLIKELY, np.log(rare))
    )
    laws = [pair_laws(protocol, pair) for pair in pairs]
    return max((tokens_epsilon(*own, tokens, DELTA), renyi_divergence(*own, protocol.event.order)) for own in laws)


@pytest.mark.parametrize(
    ("parts", "q", "epsilon"),
    [(8, 1.0, 11.27), (80, 1.0, 8.78), (80, 0.03, 4.85), pytest.param(80, 0.1, 9.71, marks=pytest.mark.slow)],
)
def test_the_counterexample_costs_what_each_draw_of_the_published_mechanism_allows(
    parts: int, q: float, epsilon: float
) -> None:
    """Source: a computation without our mollifier, in which each draw size has a ball of its own."""
    assert costliest(as_published(parts, q, 1024), 1024)[0] == pytest.approx(epsilon, abs=0.006)


def test_the_published_claim_is_exceeded_and_the_certified_one_is_not() -> None:
    published = as_published(8, 1.0, 64)
    assert isinstance(published.event, PublishedEvent)
    epsilon, divergence = costliest(published, 64)
    assert epsilon > 8
    assert divergence > 10 * published.event.loss
    assert worst_epsilon(PMixedSettings(q=1.0, tokens=64, epsilon=8.0).plan(8), 64, DELTA) <= 8
