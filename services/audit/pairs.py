"""For each protocol the pair of ensembles that should be told apart best, built from what it claims alone.

One part's model is replaced by another. The auditor builds both for the parameters of the claim, not for those that the
mechanism really works with, and lets the models go further than they are allowed to, so that a mechanism that does not
hold them back is found out.
"""

from collections.abc import Iterable

import numpy as np

from services.audit.laws import pair_laws, renyi_divergence
from services.audit.worlds import Pair, Reals, replaced
from services.privacy.accounting.channel import Corners
from services.privacy.protocol import Protocol
from services.privacy.protocols.adapmixed import ScreenedRatioEvent
from services.privacy.protocols.exponential import Exponential, FixedSizeExponentialEvent
from services.privacy.protocols.gnmax import GNMax, GNMaxEvent
from services.privacy.protocols.pmixed import RatioEvent
from services.privacy.protocols.subsample_aggregate import SubsampleAggregate, SubsampleAggregateEvent

# Log-probability of the tokens that a part all but rules out.
_NEVER = -40.0
# How many tokens may be voted for where that is a choice of the attack.
_MOST_CANDIDATES = 16
_STEPS = 16


class NoPairError(ValueError):
    """No worst case is known for this protocol."""


def worst_pair(protocol: Protocol, order: float) -> Pair:
    """The worst replacement of the last part.

    Args:
        protocol: whose claim is attacked.
        order: the Rényi order at which candidates are compared, where there are several.

    Raises:
        NoPairError: none is known.
    """
    match protocol.event:
        case RatioEvent(parts, q, radius):
            return corners(parts, q, radius)
        case ScreenedRatioEvent(parts, radius):
            return corners(parts, 1.0, radius)
        case FixedSizeExponentialEvent(parts, sample, radius):
            return _largest(Exponential(parts, sample, radius), _exponents(parts, radius), order)
        case GNMaxEvent(parts, sigma):
            votes = GNMax(parts, sigma, getattr(protocol, "candidates", _MOST_CANDIDATES))
            return _largest(votes, _votes(parts, votes.candidates), order)
        case SubsampleAggregateEvent(parts, scale):
            return _largest(SubsampleAggregate(parts, scale, 2), _sums(parts), order)
        case event:
            raise NoPairError(f"no worst case is known for {event.kind}")


def corners(parts: int, q: float, radius: float) -> Pair:
    """A token for each corner on which `channel.worst_channel` has mass.

    The part says the first before and the second after; the others say the third, which tells nothing, and, where a
    ball of this size leaves them no room there, the fourth, which the part says after.
    """
    mass = Corners.of(parts, q, radius).mass
    shared = max(0.0, 3 * mass - 1)
    masses = np.array([mass, mass - shared, mass - shared, shared, max(0.0, 1 - 3 * mass)])
    said = np.array([[0, 0, 1, 1, 0], [1, 0, 0, 0, 0], [0, 1, 0, 1, 0]], dtype=bool)
    public, said = masses[masses > 0], said[:, masses > 0]
    rows = np.where(said, np.log(public), _NEVER)
    rows -= np.logaddexp.reduce(rows, axis=1, keepdims=True)
    return replaced(np.log(public), rows, (0,) * (parts - 1), 1, 2)


def one_hot(vocabulary: int, *tokens: int) -> Reals:
    """float64 [len(tokens), V]: rows that give all but nothing to other tokens."""
    return np.where(np.arange(vocabulary) == np.array(tokens)[:, None], 0.0, _NEVER)


def _exponents(parts: int, radius: float) -> Iterable[Pair]:
    """Two tokens; the part says the first before and the second after, the others some of each.

    A part can lift a token by c only where p0 gives it at most e^-c.
    """
    rows = one_hot(2, 0, 1)
    least = min(radius, np.log(2)) + 1e-3
    for log_first in (*np.linspace(-radius - 6, -least, _STEPS), np.log(0.5)):
        public = np.array([log_first, np.log1p(-np.exp(log_first))])
        for lifted in sorted({0, (parts - 1) // 2, parts - 1}):
            others = (0,) * lifted + (1,) * (parts - 1 - lifted)
            yield replaced(public, rows, others, 0, 1)
            yield replaced(public[::-1].copy(), rows, others, 0, 1)


def _votes(parts: int, candidates: int) -> Iterable[Pair]:
    """Some vote for the first token, as the part does before, the rest for the second, as it does after."""
    for vocabulary in sorted({2, 3, min(8, candidates), min(_MOST_CANDIDATES, candidates)} - {1}):
        public = np.log(np.linspace(1.0, 0.9, vocabulary) / np.linspace(1.0, 0.9, vocabulary).sum())
        for agree in range(parts):
            yield replaced(public, one_hot(vocabulary, 0, 1), (0,) * agree + (1,) * (parts - 1 - agree), 0, 1)


def _sums(parts: int) -> Iterable[Pair]:
    """Two tokens; some of the others say the first, as the part does before, and the rest the second."""
    for agree in range(parts):
        yield replaced(np.log([0.49, 0.51]), one_hot(2, 0, 1), (0,) * agree + (1,) * (parts - 1 - agree), 0, 1)


def _largest(protocol: Protocol, pairs: Iterable[Pair], order: float) -> Pair:
    return max(pairs, key=lambda pair: renyi_divergence(*pair_laws(protocol, pair), order))
