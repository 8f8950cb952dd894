"""For each protocol the pair of ensembles that should be told apart best, built from what it claims alone.

The auditor builds them for the parameters of the claim, not for those that the mechanism really works with, and lets
the models go further than they are allowed to, so that a mechanism that does not hold them back is found out.
"""

from collections.abc import Iterable
from itertools import product

import numpy as np
from scipy.optimize import linprog

from services.audit.laws import pair_laws, renyi_divergence
from services.audit.worlds import Pair, Reals, World, with_and_without
from services.privacy.adapmixed import ScreenedRatioEvent
from services.privacy.exponential import Exponential, ExponentialEvent
from services.privacy.gnmax import GNMax, GNMaxEvent
from services.privacy.pmixed import RatioEvent
from services.privacy.protocol import Protocol
from services.privacy.subsample_aggregate import SubsampleAggregate, SubsampleAggregateEvent

# Log-probability of the tokens that a part all but rules out.
_NEVER = -40.0
# How many tokens may be voted for where that is a choice of the attack.
_MOST_CANDIDATES = 16
_STEPS = 16


class NoPairError(ValueError):
    """No worst case is known for this protocol."""


def worst_pair(protocol: Protocol, order: float) -> Pair:
    """The last part present or absent.

    Args:
        protocol: whose claim is attacked.
        order: the Rényi order at which candidates are compared, where there are several.

    Raises:
        NoPairError: none is known.
    """
    match protocol.event:
        case RatioEvent(parts, _, radius) | ScreenedRatioEvent(parts, radius):
            return corners(parts, radius)
        case ExponentialEvent(parts, q, radius):
            return _largest(Exponential(parts, q, radius), _exponents(parts, radius), order)
        case GNMaxEvent(parts, sigma):
            votes = GNMax(parts, sigma, getattr(protocol, "candidates", _MOST_CANDIDATES))
            return _largest(votes, _votes(parts, votes.candidates), order)
        case SubsampleAggregateEvent(parts, scale):
            return _largest(SubsampleAggregate(parts, scale, 2), _sums(parts), order)
        case event:
            raise NoPairError(f"no worst case is known for {event.kind}")


def worst_replacement(protocol: Protocol, order: float) -> Pair:
    """The last part replaced by another.

    Raises:
        NoPairError: none is known.
    """
    match protocol.event:
        case RatioEvent(parts, q, radius):
            return _replaced_corners(parts, q, radius, order)
        case ScreenedRatioEvent(parts, radius):
            return _replaced_corners(parts, 1.0, radius, order)
        case ExponentialEvent() | GNMaxEvent() | SubsampleAggregateEvent():
            # Removal and addition of the opposite: the part speaks for the other token instead.
            pair = worst_pair(protocol, order)
            return Pair(pair.present, _opposed(pair.present))
        case event:
            raise NoPairError(f"no worst case is known for {event.kind}")


def corners(parts: int, radius: float) -> Pair:
    """The corners (H, L), (L, H) and (L, L) of the others' and the part's own likelihood ratio (`ratio_channel`).

    One token for each: the others all say the first, the part in question says the second, far beyond the ball.
    """
    high = np.exp(radius)
    public = np.array([1.0, 1.0, high - 1]) / (high + 1)
    return with_and_without(np.log(public), one_hot(3, 0, 1), (0,) * (parts - 1) + (1,))


def one_hot(vocabulary: int, *tokens: int) -> Reals:
    """float64 [len(tokens), V]: rows that give all but nothing to other tokens."""
    return np.where(np.arange(vocabulary) == np.array(tokens)[:, None], 0.0, _NEVER)


def _exponents(parts: int, radius: float) -> Iterable[Pair]:
    """Two tokens; the part lifts the first by c and lowers the second by c, some of the others do, too.

    A part can only do so where p0 gives the first at most e^-c.
    """
    for log_first in np.linspace(-radius - 6, -radius - 1e-3, _STEPS):
        public = np.array([log_first, np.log1p(-np.exp(log_first))])
        rows = np.stack([one_hot(2, 0)[0], public])
        for lifted in sorted({0, (parts - 1) // 2, parts - 1}):
            yield with_and_without(public, rows, (0,) * lifted + (1,) * (parts - 1 - lifted) + (0,))


def _votes(parts: int, candidates: int) -> Iterable[Pair]:
    """Some vote for the first token, as the part does, and the rest for the second, among few tokens or many."""
    for vocabulary in sorted({2, 3, min(8, candidates), min(_MOST_CANDIDATES, candidates)} - {1}):
        public = np.log(np.linspace(1.0, 0.9, vocabulary) / np.linspace(1.0, 0.9, vocabulary).sum())
        for agree in range(parts):
            yield with_and_without(public, one_hot(vocabulary, 0, 1), (0,) * agree + (1,) * (parts - 1 - agree) + (0,))


def _sums(parts: int) -> Iterable[Pair]:
    """Two tokens; some of the others say the first, as the part does, and the rest the second."""
    for agree in range(parts):
        parts_of = (0,) * agree + (1,) * (parts - 1 - agree) + (0,)
        yield with_and_without(np.log([0.49, 0.51]), one_hot(2, 0, 1), parts_of)


def _largest(protocol: Protocol, pairs: Iterable[Pair], order: float) -> Pair:
    return max(pairs, key=lambda pair: renyi_divergence(*pair_laws(protocol, pair), order))


def _opposed(world: World) -> World:
    """The last part's likelihood ratios turned round: what it made likely it makes unlikely, as far as it can."""
    vocabulary = len(world.public)
    own = world.rows[world.parts[-1]]
    rest = np.where(np.arange(vocabulary) == own.argmax(), _NEVER, world.public)
    rest = rest - np.logaddexp.reduce(rest)
    return World(world.public, np.vstack([world.rows, rest]), (*world.parts[:-1], len(world.rows)))


def _replaced_corners(parts: int, q: float, radius: float, order: float) -> Pair:
    """A token for each corner of the cube of (others, new, old) that the worst distribution at ``order`` has mass on.

    It is the linear program of `channel.replacement_rdp` for as many others drawn as usual. Ratios that lie on the
    ball are exaggerated: what the mollifier makes of them is the ball again.
    """
    bounds = (np.exp(-radius), np.exp(radius))
    cube = np.array(list(product(bounds if parts > 1 else (1.0,), bounds, bounds)))
    share = q / (round(q * (parts - 1)) + 1)
    log_p, log_q = (np.log(cube[:, 0] + share * (cube[:, side] - cube[:, 0])) for side in (1, 2))
    integrand = order * log_p + (1 - order) * log_q
    means = np.vstack([np.ones(len(cube)), cube.T[0 if parts > 1 else 1 :]])
    solved = linprog(-np.exp(integrand - integrand.max()), A_eq=means, b_eq=np.ones(len(means)))
    kept = solved.x > 1e-9
    public, ratios = solved.x[kept] / solved.x[kept].sum(), cube[kept].T
    rows = np.log(public) + 2 * np.log(ratios)
    rows -= np.logaddexp.reduce(rows, axis=1, keepdims=True)
    others = (0,) * (parts - 1)
    new, old = (World(np.log(public), rows, (*others, kind)) for kind in (1, 2))
    return Pair(new, old)
