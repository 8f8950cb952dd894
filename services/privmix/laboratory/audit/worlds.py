"""Describes pairs of ensembles that an observer must not distinguish, by the models' outputs for one query."""

from dataclasses import dataclass, replace

import numpy as np
from scipy.special import log_softmax

from privmix.privacy.accounting.channel import WorstCaseRatios
from privmix.privacy.arrays import Reals

# The log-probability of a token that a part almost never outputs.
NEVER = -40.0


@dataclass(frozen=True, eq=False)
class World:
    """Holds the outputs of an ensemble's models for one query.

    Attributes:
        public: float64 [V], log-probabilities of the public model.
        rows: float64 [K, V], log-probabilities of each kind of part.
        parts: the kind of each part; None for an absent part, as in published analyses.
    """

    public: Reals
    rows: Reals
    parts: tuple[int | None, ...]


@dataclass(frozen=True)
class Pair:
    """Holds an ensemble before and after the last part's model changes."""

    before: World
    after: World


def replaced(public: Reals, rows: Reals, others: tuple[int, ...], before: int, after: int) -> Pair:
    """Returns the pair in which the last part's kind changes from `before` to `after`."""
    world = World(public, rows, (*others, before))
    return Pair(world, replace(world, parts=(*others, after)))


def removed(public: Reals, rows: Reals, parts: tuple[int, ...]) -> Pair:
    """Returns the pair in which the last part is present before and absent after, as in published analyses."""
    world = World(public, rows, parts)
    return Pair(world, replace(world, parts=(*parts[:-1], None)))


def worst_of_pmixed(parts: int, q: float, radius: float) -> Pair:
    """Returns the pair of ensembles that attains `channel.worst_channel`, with one token for each corner with mass.

    The part outputs the first token before and the second after. The others output the third, which reveals nothing,
    and, if the ball leaves too little room there, the fourth, which the part outputs after too.
    """
    mass = WorstCaseRatios.of(parts, q, radius).mass
    shared = max(0.0, 3 * mass - 1)
    masses = np.array([mass, mass - shared, mass - shared, shared, max(0.0, 1 - 3 * mass)])
    outputs = np.array([[0, 0, 1, 1, 0], [1, 0, 0, 0, 0], [0, 1, 0, 1, 0]], dtype=bool)
    public, outputs = masses[masses > 0], outputs[:, masses > 0]
    rows = log_softmax(np.where(outputs, np.log(public), NEVER), axis=1)
    return replaced(np.log(public), rows, (0,) * (parts - 1), 1, 2)
