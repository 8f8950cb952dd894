"""Two ensembles that an observer must not tell apart, as one query sees them."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]

# Log-probability of a token that a part all but rules out.
NEVER = -40.0


@dataclass(frozen=True, eq=False)
class World:
    """An ensemble as one query sees it.

    Attributes:
        public: float64 [V], log-probabilities of the public model.
        rows: float64 [K, V], log-probabilities of each kind of part.
        parts: the kind of each part; None where a part is absent, which published analyses compare with.
    """

    public: Reals
    rows: Reals
    parts: tuple[int | None, ...]


@dataclass(frozen=True)
class Pair:
    """An ensemble before and after the last part's model is replaced by another."""

    before: World
    after: World


def replaced(public: Reals, rows: Reals, others: tuple[int, ...], before: int, after: int) -> Pair:
    """The pair in which the last part changes its kind, and the other parts have the kinds `others`."""
    world = World(public, rows, (*others, before))
    return Pair(world, replace(world, parts=(*others, after)))


def removed(public: Reals, rows: Reals, parts: tuple[int, ...]) -> Pair:
    """The pair in which the last part is there before, and absent after: what published analyses compare."""
    world = World(public, rows, parts)
    return Pair(world, replace(world, parts=(*parts[:-1], None)))


def one_hot(vocabulary: int, *tokens: int) -> Reals:
    """float64 [len(tokens), V]: log-probabilities that give all but nothing to other tokens."""
    return np.where(np.arange(vocabulary) == np.array(tokens)[:, None], 0.0, NEVER)
