"""Tokens of two ensembles that an observer must not tell apart, released by the code that serves."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.privacy.mollifiers.shaping import shape
from services.privacy.protocol import Answers, Protocol
from services.privacy.sampling.categorical import sample
from services.privacy.worlds import World

Key = tuple[int, ...]
"""The kinds of the parts that answer a query."""

_AT_ONCE = 4096


def answers(world: World, keys: Sequence[Key]) -> Answers:
    """The models' answers to the same query, once for each key."""
    asked = [kind for key in keys for kind in key]
    public = torch.from_numpy(world.public).float().expand(len(keys), -1)
    rows = torch.from_numpy(world.rows[asked].reshape(len(asked), len(world.public))).float()
    return shape(public, rows, [tuple(range(len(key))) for key in keys])


def tokens(protocol: Protocol, world: World, count: int) -> NDArray[np.int64]:
    """As many tokens, each drawn, released and sampled by the code that serves.

    A release without noise of its own is the same whenever the same kinds are asked, and is computed once.
    """
    keys = [_asked(world, protocol.draw()) for _ in range(count)]
    if protocol.noisy:
        blocks = [keys[start : start + _AT_ONCE] for start in range(0, count, _AT_ONCE)]
        return np.array([token for block in blocks for token in sample(_weights(protocol, world, block))])
    distinct = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    released = _weights(protocol, world, list(distinct))
    return np.array(sample(released[[distinct[key] for key in keys]]))


def _asked(world: World, draw: Sequence[int]) -> Key:
    return tuple(kind for part in draw if (kind := world.parts[part]) is not None)


def _weights(protocol: Protocol, world: World, keys: Sequence[Key]) -> Tensor:
    return protocol.release(answers(world, keys)).weights
