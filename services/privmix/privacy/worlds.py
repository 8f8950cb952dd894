"""Describes pairs of ensembles that an observer must not distinguish, by the models' outputs for one query."""

from dataclasses import dataclass, replace

import numpy as np

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


def one_hot(vocabulary: int, *tokens: int) -> Reals:
    """Returns log-probabilities that concentrate on one token in each row, float64 [len(tokens), V]."""
    return np.where(np.arange(vocabulary) == np.array(tokens)[:, None], 0.0, NEVER)
