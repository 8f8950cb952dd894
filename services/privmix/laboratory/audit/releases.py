"""Compares releases with the protocol's published formula, without statistics.

A release is a vector of integer weights, so the distribution of the token given the draw is known exactly. A radius
that is wrong by 5 % changes a probability by about 1 % of the radius; from tokens alone, this would need hundreds of
thousands of samples (`frequencies`). This comparison does not cover the draw of parts, the scale of noise, and the use
of a token after its release.
"""

from collections.abc import Iterator

import numpy as np
from scipy.special import log_softmax

from privmix.laboratory.audit import distributions
from privmix.laboratory.audit.finding import Finding
from privmix.privacy.protocol import Protocol
from privmix.privacy.worlds import World

ATTACK = "releases"
_WORLDS, _DRAWS, _VOCABULARY, _SPREAD = 8, 8, 24, 1.5
_SEED = 0


def audit_releases(protocol: Protocol, subject: str | None = None) -> Finding | None:
    """Compares releases with the formula in the known worst cases and on random distributions.

    Returns:
        None if the protocol has no formula apart from its code.
    """
    differences = []
    for world in (*_worst(protocol), *_random(protocol)):
        difference = _largest_difference(protocol, world)
        if difference is None:
            return None
        differences.append(difference)
    largest = max(differences)
    explained = protocol.formula_error
    text = f"a token's probability differs from the formula by {largest:.2g}; rounding explains at most {explained:.2g}"
    return Finding.of_description(
        ATTACK,
        protocol,
        subject,
        1.0,
        (text,) if largest > explained else (),
        {"inputs": len(differences), "largest difference": largest},
    )


def _worst(protocol: Protocol) -> Iterator[World]:
    for pair in (*protocol.event.worst_pairs(), *protocol.worst_pairs()):
        yield from (pair.before, pair.after)


def _random(protocol: Protocol) -> Iterator[World]:
    """Yields ensembles of different parts, from close to the public model to far from it."""
    generator = np.random.default_rng(_SEED)
    for spread in np.geomspace(_SPREAD / 10, 2 * _SPREAD, _WORLDS):
        public = log_softmax(generator.normal(scale=_SPREAD, size=_VOCABULARY))
        rows = log_softmax(public + generator.normal(scale=spread, size=(protocol.models, _VOCABULARY)), axis=1)
        yield World(public, rows, tuple(range(protocol.models)))


def _largest_difference(protocol: Protocol, world: World) -> float | None:
    """Returns the largest difference of a token's probability over some draws; None without a formula."""
    drawn = {tuple(sorted(protocol.draw())) for _ in range(_DRAWS)}
    keys = sorted({tuple(kind for part in parts if (kind := world.parts[part]) is not None) for parts in drawn})
    laws = protocol.release_law(distributions.answers(world, keys)).numpy()
    public, rows, largest = np.exp(world.public), np.exp(world.rows), 0.0
    for key, law in zip(keys, laws, strict=True):
        stated = protocol.formula(public, rows[list(key)])
        if stated is None:
            return None
        largest = max(largest, float(np.abs(law - stated).max()))
    return largest
