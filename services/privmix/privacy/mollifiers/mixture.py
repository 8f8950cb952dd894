"""Computes the mean of mollified distributions as integer weights, which are sampled exactly.

The privacy analysis requires more than that the released distribution lies in the ball. Let P(S) be the distribution if
the parts S are drawn. Then (m+1) P(S'+i) - m P(S'), with m = |S'|, must lie in the ball too: the analysis treats it as
the contribution of part i. A mean must not be rounded in float32, because this multiplies the error by m. So rows are
summed in float64, each divided by its own sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import scipy

from privmix.foundation.lazily import torch
from privmix.privacy.mollifiers.blocks import rows_at_once, scratch, totals
from privmix.privacy.protocol import Answers
from privmix.privacy.sampling.categorical import TOTAL

if TYPE_CHECKING:
    from torch import Tensor

# Maps (ratios [C, V], public [V] or [C, V], the number of drawn parts, out) to mollified distributions, float32 [C, V],
# which may be written to `out`.
Mollify: TypeAlias = "Callable[[Tensor, Tensor, int, Tensor], Tensor]"

# A power of two, so that the public model's weights are exact: its probabilities are multiples of 2**-60.
_SCALE = TOTAL / 2
# A row whose sum differs from 1 by more than this is replaced by the public model.
_ACCEPTED = 2.0**-16
# The largest fraction of a radius that may be lost to rounding.
_MAX_LOSS = 0.1


def slack(parts: int, radius: float) -> float:
    """Returns how much smaller than ``radius`` the projection must be, so that the rounded release keeps to ``radius``.

    The three terms cover: the distance from 1 of the float32 sums of p0 and of an accepted row (2**-16 is accepted, and
    at most half as much again in either sum), with float32 entries; rounding weights down to integers, for the smallest
    p0 = 2**-36 at the ball's lower bound, twice for each of ``parts`` rows; and the float64 rounding of a mean, as
    often, for a token at which the other parts are at the upper bound and the replaced part at the lower.
    """
    return 2.0**-14 + 2.0**-24 * parts * math.exp(radius) + 2.0**-46 * parts * math.exp(2 * radius)


def usable_radii(slack: Callable[[float], float], least: float, middle: float) -> tuple[float, float]:
    """Returns the smallest and the largest radius that loses at most the share `_MAX_LOSS` to rounding.

    Args:
        slack: maps a radius to its loss to rounding.
        least: a radius that is too small.
        middle: a usable radius.

    Raises:
        ValueError: rounding takes too much of ``middle``.
    """

    def left(radius: float) -> float:
        return _MAX_LOSS * radius - slack(radius)

    if left(middle) <= 0:
        raise ValueError(f"rounding takes more than a tenth of a radius of {middle:g}")
    solve = scipy.optimize.brentq
    return solve(left, least, middle, xtol=1e-12), solve(left, middle, 32.0)


def integer_weights(answers: Answers, mollify: Mollify) -> Tensor:
    """Returns the mean of each sequence's mollified rows, or the public model if it has none, int64 [S, V].

    For protocols that read raw rows, and for evaluation. It branches on the number of rows of each sequence.
    """
    public, ratios = answers.public, answers.ratios
    weights = torch.empty(public.shape, dtype=torch.int64, device=public.device)
    spans = list(answers.spans())
    single = [s for s, (first, last) in enumerate(spans) if last - first == 1]
    at_once = rows_at_once(ratios)
    for start in range(0, len(single), at_once):
        sequences = single[start : start + at_once]
        p0, row_ratios = public[sequences], ratios[[spans[s][0] for s in sequences]]
        rows = accepted(mollify(row_ratios, p0, 1, scratch("rows", row_ratios)), p0)
        weights[sequences] = scaled(rows)
    for s, (first, last) in enumerate(spans):
        if last == first:
            weights[s] = scaled(public[s])
        elif last - first > 1:
            weights[s] = _mean(ratios[first:last], public[s], mollify, at_once).mul_(_SCALE)
    return weights


def accepted(rows: Tensor, public: Tensor) -> Tensor:
    """Replaces rows that are not distributions by the public model, in place. The same operations run for every row.

    Args:
        rows: float32 [..., V].
        public: float32, p0, which broadcasts to the shape of ``rows``.
    """
    good = ((totals(rows) - 1).abs() <= _ACCEPTED).to(rows.dtype)
    return rows.mul_(good).nan_to_num_(0.0).addcmul_(public, 1 - good)


def scaled(probabilities: Tensor) -> Tensor:
    """Returns float32 probabilities as integer weights, int64; those of the public model are exact."""
    return (probabilities * _SCALE).long()


def _mean(ratios: Tensor, public: Tensor, mollify: Mollify, at_once: int) -> Tensor:
    """Returns the mean of one sequence's mollified rows [n, V], each divided by its own sum, float64 [V]."""
    mean = scratch("mean", public, torch.float64).zero_()
    for start in range(0, len(ratios), at_once):
        block = ratios[start : start + at_once]
        rows = accepted(mollify(block, public, len(ratios), scratch("rows", block)), public)
        exact = scratch("inner", rows, torch.float64).copy_(rows)
        mean.addmv_(exact.T, 1 / (len(ratios) * exact.sum(dim=1)))
    return mean
