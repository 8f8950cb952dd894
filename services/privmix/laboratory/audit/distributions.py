"""Computes the exact distribution of a token in two worlds, and the epsilon of many."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from dp_accounting.pld import privacy_loss_distribution
from scipy.optimize import bisect
from scipy.special import gammaln, xlogy

from privmix.laboratory.audit.worlds import Pair, World
from privmix.privacy.arrays import Reals
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocol import Answers, Protocol

DrawnParts = tuple[int, ...]
"""The kinds of the parts that answer a query."""

# The largest number of tokens for which all counts are enumerated.
_MAX_COUNTED = 2048
# Draws with a smaller probability are ignored.
_LEAST_CHANCE = 1e-16
# A larger epsilon counts as infinite.
_MAX_EPSILON = 500.0


def answers(world: World, keys: Sequence[DrawnParts]) -> Answers:
    """Returns the models' answers to one query, once for each key."""
    kinds = [kind for key in keys for kind in key]
    public = torch.from_numpy(world.public).float().expand(len(keys), -1)
    rows = torch.from_numpy(world.rows[kinds].reshape(len(kinds), len(world.public))).float()
    return shape(public, rows, [tuple(range(len(key))) for key in keys])


def token_law(protocol: Protocol, world: World) -> Reals:
    """Returns the probability of each token, float64 [V], from the releases of a protocol without noise."""
    assert not protocol.noisy
    keys, chances = draws(protocol, world)
    weights = protocol.distribution(answers(world, keys)).weights.double().numpy()
    laws = weights / weights.sum(axis=1, keepdims=True)
    return np.asarray(chances @ laws / chances.sum(), dtype=np.float64)


def draws(protocol: Protocol, world: World) -> tuple[list[DrawnParts], Reals]:
    """Returns the possible draws of a token, as kinds of parts, and the probability of each."""
    present = [kind for kind in world.parts if kind is not None]
    kinds = range(len(world.rows))
    likely = {
        tuple(np.repeat(kinds, drawn).tolist()): chance
        for drawn, chance in protocol.draws([present.count(kind) for kind in kinds]).items()
        if chance > _LEAST_CHANCE
    }
    return list(likely), np.array(list(likely.values()))


def pair_laws(protocol: Protocol, pair: Pair) -> tuple[Reals, Reals]:
    """Returns the distributions of a token before and after the replacement, each float64 [V]."""
    return token_law(protocol, pair.before), token_law(protocol, pair.after)


def log_ratio(p: Reals, q: Reals) -> Reals:
    """Returns log p / q of each token; 0 where both are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.nan_to_num(np.log(p) - np.log(q), nan=0.0, posinf=np.inf, neginf=-np.inf))


def tokens_epsilon(p: Reals, q: Reals, tokens: int, delta: float, interval: float = 1e-5) -> float:
    """Returns the epsilon at ``delta`` of independent tokens with the distributions p and q, never overstated.

    The counts of the tokens are a sufficient statistic. With a vocabulary of two or three tokens, enumerates all
    counts. With a larger one, composes the privacy loss distribution of p and q, with losses rounded down to multiples
    of ``interval``.
    """
    p, q = _merged(p, q)
    if len(p) == 1:
        return 0.0
    if len(p) <= 3 and tokens <= _MAX_COUNTED:
        return _counted_epsilon(p, q, tokens, delta)
    composed = privacy_loss_distribution.from_two_probability_mass_functions(
        _mass_function(q), _mass_function(p), False, interval, symmetric=False
    ).self_compose(tokens)
    return float(composed.get_epsilon_for_delta(delta))


def _merged(p: Reals, q: Reals) -> tuple[Reals, Reals]:
    """Merges tokens of the same likelihood ratio, because the choice among them carries no information."""
    kept = (p > 0) | (q > 0)
    _, kinds = np.unique(np.round(log_ratio(p[kept], q[kept]), 12), return_inverse=True)
    merged = [np.bincount(kinds, law[kept]) for law in (p, q)]
    return merged[0] / merged[0].sum(), merged[1] / merged[1].sum()


def _counted_epsilon(p: Reals, q: Reals, tokens: int, delta: float) -> float:
    counts = np.indices((tokens + 1,) * (len(p) - 1)).reshape(len(p) - 1, -1)
    counts = np.vstack([counts, tokens - counts.sum(axis=0)])[:, counts.sum(axis=0) <= tokens]
    arrangements = gammaln(tokens + 1) - gammaln(counts + 1).sum(axis=0)
    log_p, log_q = (arrangements + xlogy(counts, law[:, None]).sum(axis=0) for law in (p, q))
    return max(_epsilon_of_masses(log_p, log_q, delta), _epsilon_of_masses(log_q, log_p, delta))


def _epsilon_of_masses(log_p: Reals, log_q: Reals, delta: float) -> float:
    """Returns the smallest epsilon at which the hockey-stick divergence of P from Q is at most ``delta``."""
    log_p, log_q = log_p[np.isfinite(log_p)], log_q[np.isfinite(log_p)]

    def excess(epsilon: float) -> float:
        return float(-(np.exp(log_p) * np.expm1(np.minimum(0.0, epsilon + log_q - log_p))).sum()) - delta

    if excess(0.0) <= 0:
        return 0.0
    if excess(_MAX_EPSILON) > 0:
        return math.inf
    return float(bisect(excess, 0.0, _MAX_EPSILON, xtol=1e-9)) - 1e-9


def _mass_function(law: Reals) -> dict[int, float]:
    return {token: math.log(chance) for token, chance in enumerate((law / law.sum()).tolist()) if chance > 0}
