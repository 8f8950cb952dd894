"""The aggregate: the mean of mollified distributions, as integer weights that are sampled exactly.

The privacy analysis needs more of what is released than that it lies in the ball. With P(S) the distribution sampled
when the parts S are drawn, (m+1) P(S'+i) - m P(S') must lie in the ball too, for m = |S'|: it is the distribution that
part i is held to have contributed. So a mean may not be rounded in float32, whose error this multiplies by m. Rows are
summed in float64, each divided by its own sum.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from services.privacy.mollifiers.blocks import Column, column, row_sums, rows_at_once, scratch
from services.privacy.protocol import Answers
from services.privacy.sampling.categorical import TOTAL

# From (ratios [C, V], public [V] or [C, V], how many parts were drawn) to mollified distributions float32 [C, V], which
# may be written into the fourth argument.
Mollify = Callable[[Tensor, Tensor, int, Tensor], Tensor]

# A power of two, so that the public model's weights are exact: its probabilities are multiples of 2**-60.
_SCALE = TOTAL / 2
# A row whose sum is farther from 1 than this is answered by the public model.
_ACCEPTED = 2.0**-16
# The largest share of a radius that rounding may take.
_LARGEST_LOSS = 0.1


def slack(parts: int, radius: float) -> float:
    """How much smaller than ``radius`` to project, so that everything released, rounded, keeps to ``radius``.

    The terms: how far the float32 sums of p0 and of an accepted row are from 1 (2**-16 accepted, and at most half as
    much again in either sum), with float32 entries; rounding weights down to integers, of the smallest p0 = 2**-36 at
    the lower bound of the ball, twice for each of ``parts`` rows; float64 rounding of a mean, as often, of a token
    where the others sit at the upper bound and the part in question at the lower.
    """
    return 2.0**-14 + 2.0**-24 * parts * math.exp(radius) + 2.0**-46 * parts * math.exp(2 * radius)


def usable_radii(slack: Callable[[float], float], least: float, middle: float) -> tuple[float, float]:
    """The smallest and the largest radius of which rounding takes at most `_LARGEST_LOSS`.

    Args:
        slack: what rounding takes of a radius.
        least: a radius that is too small.
        middle: a radius that is neither too small nor too large.

    Raises:
        ValueError: rounding takes too much of ``middle``.
    """

    def left(radius: float) -> float:
        return _LARGEST_LOSS * radius - slack(radius)

    if left(middle) <= 0:
        raise ValueError(f"rounding takes more than a tenth of a radius of {middle:g}")
    return brentq(left, least, middle, xtol=1e-12), brentq(left, middle, 32.0)


def integer_weights(answers: Answers, mollify: Mollify) -> Tensor:
    """int64 [S, V]: for each sequence the mean of its mollified rows, the public model where it has none."""
    public, ratios = answers.public, answers.ratios
    weights = torch.empty(public.shape, dtype=torch.int64, device=public.device)
    spans = list(answers.spans())
    single = [s for s, (first, last) in enumerate(spans) if last - first == 1]
    at_once = rows_at_once(ratios)
    for start in range(0, len(single), at_once):
        sequences = single[start : start + at_once]
        own, theirs = public[sequences], ratios[[spans[s][0] for s in sequences]]
        rows, _ = _accepted(mollify(theirs, own, 1, scratch("rows", theirs)), own)
        weights[sequences] = rows.mul_(_SCALE).long()
    for s, (first, last) in enumerate(spans):
        if last == first:
            weights[s] = public[s] * _SCALE
        elif last - first > 1:
            weights[s] = _mean(ratios[first:last], public[s], mollify, at_once).mul_(_SCALE)
    return weights


def _mean(ratios: Tensor, public: Tensor, mollify: Mollify, at_once: int) -> Tensor:
    """float64 [V]: the mean of one sequence's mollified rows [n, V], each divided by its own sum."""
    mean = scratch("mean", public, torch.float64).zero_()
    for start in range(0, len(ratios), at_once):
        block = ratios[start : start + at_once]
        rows = mollify(block, public, len(ratios), scratch("rows", block))
        rows, sums = _accepted(scratch("inner", rows, torch.float64).copy_(rows), public)
        mean.addmv_(rows.T, column(1 / (len(ratios) * sums), rows)[:, 0])
    return mean


def _accepted(rows: Tensor, public: Tensor) -> tuple[Tensor, Column]:
    """The rows, with the public model in place of those that are no distribution, and their sums."""
    sums = row_sums(rows)
    accepted = np.abs(sums - 1) <= _ACCEPTED
    if not accepted.all():
        rows = torch.where(column(accepted, rows) > 0, rows, public.to(rows))
        sums = row_sums(rows)
    return rows, sums
