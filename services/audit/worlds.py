"""Two ensembles that an observer must not tell apart, and the tokens that the service's own code releases from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.privacy.mollifiers.shaping import shape
from services.privacy.protocol import Answers, Protocol
from services.privacy.protocols.adapmixed import AdaPMixed
from services.privacy.protocols.gnmax import GNMax
from services.privacy.protocols.subsample_aggregate import SubsampleAggregate
from services.privacy.sampling.categorical import sample

Reals = NDArray[np.float64]
Key = tuple[int, ...]

NOISY = (AdaPMixed, GNMax, SubsampleAggregate)
"""Protocols whose `release` draws noise: it is called anew for every token."""

_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class World:
    """An ensemble as one query sees it.

    Attributes:
        public: float64 [V], log-probabilities of the public model.
        rows: float64 [K, V], those of the kinds of part there are.
        parts: the kind of each part; None where a part is absent, which published analyses compare with.
    """

    public: Reals
    rows: Reals
    parts: tuple[int | None, ...]

    def asked(self, draw: Sequence[int]) -> Key:
        """The kinds of the parts drawn that are there."""
        return tuple(kind for part in draw if (kind := self.parts[part]) is not None)

    def answers(self, keys: Sequence[Key]) -> Answers:
        """The models' answers to the same query, once for each key."""
        asked = [kind for key in keys for kind in key]
        public = torch.from_numpy(self.public).float().expand(len(keys), -1)
        rows = torch.from_numpy(self.rows[asked].reshape(len(asked), len(self.public))).float()
        return shape(public, rows, [tuple(range(len(key))) for key in keys])


@dataclass(frozen=True)
class Pair:
    """An ensemble before and after the last part's model is replaced by another."""

    before: World
    after: World


def replaced(public: Reals, rows: Reals, others: tuple[int, ...], before: int, after: int) -> Pair:
    """The kinds of the other parts, and that of the last before and after its replacement."""
    world = World(public, rows, (*others, before))
    return Pair(world, replace(world, parts=(*others, after)))


def removed(public: Reals, rows: Reals, parts: tuple[int, ...]) -> Pair:
    """The last part is there before, and absent after: what published analyses compare."""
    world = World(public, rows, parts)
    return Pair(world, replace(world, parts=(*parts[:-1], None)))


def weights(protocol: Protocol, world: World, keys: Sequence[Key]) -> Tensor:
    """int64 [len(keys), V]: what the protocol releases to each key."""
    return protocol.release(world.answers(keys)).weights


def tokens(protocol: Protocol, world: World, count: int) -> NDArray[np.int64]:
    """As many tokens, each drawn, released and sampled by the code that serves.

    A release without noise of its own is the same whenever the same kinds are asked, and is computed once.
    """
    keys = [world.asked(protocol.draw()) for _ in range(count)]
    if isinstance(protocol, NOISY):
        blocks = [keys[start : start + _AT_ONCE] for start in range(0, count, _AT_ONCE)]
        return np.array([token for block in blocks for token in sample(weights(protocol, world, block))])
    distinct = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    released = weights(protocol, world, list(distinct))
    return np.array(sample(released[[distinct[key] for key in keys]]))
