"""Provides secret randomness from the operating system's generator only.

A guarantee that depends on a random draw is void if the draw can be predicted. So no seeded generator is used, and
every draw that a guarantee rests on comes from here, or from OpenDP's samplers in `noise`. A test names all other
modules that draw at random, and why their draws may be known.
"""

import os
import secrets

import numpy as np
from numpy.typing import NDArray

_WORD = 64
_FRACTION = 53  # the bits of a float64


def poisson_subsample(parts: int, q: float) -> tuple[int, ...]:
    """Draws each part independently with probability ``q``; returns the indices of the drawn parts.

    The probability is rounded down to a multiple of 2**-64, so it never exceeds the accounted probability.

    Raises:
        ValueError: ``parts`` is negative or ``q`` lies outside [0, 1].
    """
    if parts < 0:
        raise ValueError(f"parts must not be negative, got {parts}")
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"q must be a probability between 0 and 1, got {q}")
    threshold = int(q * 2**_WORD)
    if threshold == 2**_WORD:
        return tuple(range(parts))
    words = np.frombuffer(os.urandom(parts * _WORD // 8), dtype=np.uint64)
    return tuple(np.flatnonzero(words < np.uint64(threshold)).tolist())


def fixed_size_subsample(parts: int, sample: int) -> tuple[int, ...]:
    """Draws ``sample`` of the parts, with equal probability for every set of this size; returns ascending indices.

    Raises:
        ValueError: ``sample`` is negative or above ``parts``.
    """
    return tuple(sorted(secrets.SystemRandom().sample(range(parts), sample)))


def uniform_below(bound: int) -> int:
    """Draws an exactly uniform integer in [0, bound)."""
    return secrets.randbelow(bound)


def normal(count: int) -> NDArray[np.float64]:
    """Draws ``count`` independent standard normal numbers in floating point (Box and Muller 1958)."""
    pairs = -(-count // 2)
    words = np.frombuffer(os.urandom(2 * pairs * _WORD // 8), dtype=np.uint64)
    uniform = (words >> np.uint64(_WORD - _FRACTION)).astype(np.float64) * 2.0**-_FRACTION
    radius = np.sqrt(-2 * np.log1p(-uniform[:pairs]))
    angle = 2 * np.pi * uniform[pairs:]
    return np.asarray(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count])
