"""The papers' formulas of a token's distribution given the draw, without the protocols' code."""

import math
from functools import singledispatch

import numpy as np
from scipy.optimize import bisect

from privmix.privacy.arrays import Reals
from privmix.privacy.mollifiers.mixture import slack
from privmix.privacy.mollifiers.projection import Projection
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols import exponential, individual
from privmix.privacy.protocols.adapmixed import AdaPMixed
from privmix.privacy.protocols.ensemble import Ensemble
from privmix.privacy.protocols.exponential import Exponential
from privmix.privacy.protocols.finetuned import Finetuned
from privmix.privacy.protocols.individual import Individual
from privmix.privacy.protocols.pmixed import PMixed
from privmix.privacy.protocols.public import Public

ROUNDING = 3e-5
"""Several times the rounding of a probability to float32 and to integers."""


@singledispatch
def formula(protocol: Protocol, public: Reals, rows: Reals) -> Reals | None:
    """Returns the distribution of one token given the draw, float64 [V]; None for a protocol without a formula.

    It uses the radius that remains after the mechanism makes room for rounding.

    Args:
        public: float64 [V], probabilities of the public model.
        rows: float64 [n, V], probabilities of the n models drawn.
    """
    return None


@formula.register(Ensemble)
@formula.register(Finetuned)
def _(protocol: Protocol, public: Reals, rows: Reals) -> Reals:
    return np.asarray(rows.mean(axis=0))


@formula.register
def _(protocol: Public, public: Reals, rows: Reals) -> Reals:
    return public


@singledispatch
def formula_error(protocol: Protocol) -> float:
    """Returns the largest difference of a probability between `formula` and a release that rounding explains."""
    return ROUNDING


def has_formula(mechanism: type[Protocol]) -> bool:
    return formula.dispatch(mechanism) is not formula.dispatch(Protocol)


@formula.register
def _(protocol: PMixed, public: Reals, rows: Reals) -> Reals | None:
    return _mean_in_ball(public, rows, protocol.radius, 1, protocol.projection)


@formula.register
def _(protocol: AdaPMixed, public: Reals, rows: Reals) -> Reals | None:
    """Of a token whose query passes the screening."""
    return _mean_in_ball(public, rows, protocol.radius, protocol.parts, protocol.projection)


@formula_error.register
def _(protocol: PMixed) -> float:
    """A row at the bounds of its ball lacks as much of 1 as the ball is smaller; the projection spreads it."""
    return ROUNDING if protocol.radius is None else max(ROUNDING, slack(1, protocol.radius))


@formula_error.register
def _(protocol: AdaPMixed) -> float:
    return ROUNDING if protocol.radius is None else max(ROUNDING, slack(protocol.parts, protocol.radius))


def _mean_in_ball(public: Reals, rows: Reals, radius: float | None, parts: int, by: Projection) -> Reals | None:
    if radius is None:
        return None
    moved = [_projected(public, row, radius - slack(parts, radius), by) for row in rows]
    return np.asarray(np.mean(moved, axis=0) if moved else public / public.sum())


def _projected(public: Reals, row: Reals, radius: float, by: Projection) -> Reals:
    """Computes a projection by its definition, with a root search."""
    public, row = public / public.sum(), row / row.sum()
    low, high = math.exp(-radius), math.exp(radius)
    ratios = row / public
    if by == "mix":
        room = [(high - 1) / (ratios.max() - 1), (1 - low) / (1 - ratios.min())] if ratios.max() > 1 else [1.0]
        return np.asarray(public + min(1.0, *room) * (row - public))
    scale = bisect(lambda log: float(public @ np.clip(np.exp(log) * ratios, low, high)) - 1, -100.0, 100.0, xtol=1e-13)
    return np.asarray(public * np.clip(math.exp(scale) * ratios, low, high))


@formula.register
def _(protocol: Exponential, public: Reals, rows: Reals) -> Reals:
    radius = protocol.radius - exponential.slack(protocol.sample, protocol.radius)
    logs = np.log(rows / public)
    first = np.array([_log_mean(public, row, radius) for row in logs])
    second = np.array([_log_mean(public, row + step, radius) for row, step in zip(logs, first, strict=True)])
    slopes = np.divide(second - first, first, out=np.zeros(len(rows)), where=first != 0)
    centres = np.clip(first / (1 - np.clip(slopes, 0, exponential._MAX_SLOPE)), -radius, radius)
    clipped = np.clip(logs + centres[:, None], -radius, radius)
    weights = public * np.exp(clipped.mean(axis=0))
    return np.asarray(weights / weights.sum())


@formula_error.register
def _(protocol: Exponential) -> float:
    """A mean of clipped log-ratios is wrong by half a step at most, and a probability by half of that."""
    return max(ROUNDING, protocol._step / 4)


def _log_mean(public: Reals, log_ratios: Reals, radius: float) -> float:
    return float(np.log(public @ np.exp(np.clip(log_ratios, -radius, radius)) / public.sum()))


@formula.register
def _(protocol: Individual, public: Reals, rows: Reals) -> Reals:
    """Of a token that may take an equal share of full accounts."""
    fraction = individual.WHOLE // protocol.tokens / individual.WHOLE
    affordable = math.sqrt(fraction * protocol.size * protocol.parts**2 * (1 - protocol.lower))
    tilts = []
    for row in rows:
        ratios = np.divide(row, public, out=np.zeros_like(row), where=public > 0)
        clipped = np.clip(ratios, 0, 1 + protocol.cap)
        centre = public @ clipped
        strength = min(individual._STRONGEST, affordable / math.sqrt(1 + public @ (clipped - centre) ** 2))
        below, above = protocol.lower / strength, min(protocol.upper / strength, protocol.cap)
        centre = public @ np.clip(ratios, centre - below, centre + above)
        clipped = np.clip(ratios, centre - below, centre + above)
        mean = public @ clipped
        limits = protocol.lower / (mean - centre + below), protocol.upper / (centre + above - mean)
        scale = min(strength, affordable / math.sqrt(1 + public @ (clipped - mean) ** 2), *limits)
        tilts.append(scale * (clipped - mean))
    return np.asarray(public * (1 + np.mean(tilts, axis=0)))
