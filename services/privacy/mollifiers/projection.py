"""Implements the ratio mollifier: projects a part's distribution into the ball M_c = { r : e^-c p0 <= r <= e^c p0 }.

The released distribution must lie in the ball exactly. So callers pass a radius that is smaller by `slack`, which
covers all rounding between the projection and the integer weights (`mixture`).
"""

import math
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import bisect
from torch import Tensor

from services.privacy.mollifiers.blocks import column, row_sums, scratch

Projection = Literal["clip", "mix"]
Reals = NDArray[np.float64]

# The tolerance for the sum of a projected row. Sampling divides by the sum, so the tolerance only limits the accuracy
# of s; an error of s costs its square in KL.
TOLERANCE = 2.0**-17
# If p_i is 0 on nearly all of p0's mass, no scale is large enough. Then p_i is replaced by this value where it is 0.
_VANISHING = 2.0**-64
# The bracket of the roots: ratios are at least _VANISHING and at most 2**36.
_BRACKET = (2.0**-48, 2.0**96)
# Replaces 0 as a divisor; the resulting step is always outside the bracket.
_NOTHING = 1e-30
_NEWTON_STEPS = 8
_STEPS = 64
# The derivative of clamp in one pass: keeps values that are not clamped and sets the others to 0.
_pass_unclamped = torch.ops.aten.hardtanh_backward.grad_input


def clip(ratios: Tensor, public: Tensor, radius: float, out: Tensor | None = None) -> Tensor:
    """Returns the member of the ball that is closest to p_i in KL: p0 clamp(s u, L, H), with s such that it sums to 1.

    The sum is monotone and piecewise linear in s, so Newton's method reaches the root once the set of clamped tokens is
    right. If Newton's method leaves the bracket or converges slowly, geometric bisection replaces its step.

    Args:
        ratios: float32 [C, V], u = p_i / p0.
        public: float32 [V]; or [C, V], one for each row.
        radius: c in nats.
        out: float32 [C, V], the tensor for the result.

    Returns:
        float32 [C, V], sums within `TOLERANCE` of 1 up to the rounding of the sum.
    """
    projected, solved = _clip(ratios, public, radius, out)
    if not solved.all():  # repeat only these rows, because a part's row must not depend on another part's row
        rows = torch.from_numpy(~solved).to(ratios.device)
        p0 = public if public.dim() == 1 else public[rows]
        projected[rows] = _clip(ratios[rows].clamp_min_(_VANISHING), p0, radius, None)[0]
    return projected


def _clip(ratios: Tensor, public: Tensor, radius: float, out: Tensor | None) -> tuple[Tensor, NDArray[np.bool_]]:
    """Returns the projected rows, and which of them are solved."""
    low, high = math.exp(-radius), math.exp(radius)
    scaled, projected = scratch("inner", ratios), torch.empty_like(ratios) if out is None else out
    scale, applied = np.ones(len(ratios)), ratios
    below, above = np.full((2, len(ratios)), np.array(_BRACKET)[:, None])
    for count in range(_STEPS):
        torch.clamp(applied, low, high, out=projected).mul_(public)
        missing = 1 - row_sums(projected)
        solved = np.abs(missing) <= TOLERANCE
        if solved.all() or count == _STEPS - 1:
            break
        _pass_unclamped(projected, applied, low, high, grad_input=projected)
        newton = scale * (1 + missing / np.maximum(row_sums(projected), _NOTHING))
        below, above = np.where(missing > 0, scale, below), np.where(missing < 0, scale, above)
        usable = (newton > below) & (newton < above) & (count < _NEWTON_STEPS or count % 2 == 0)
        step = np.where(solved, 1, np.where(usable, newton, np.sqrt(below * above)) / scale)
        applied = torch.mul(applied, column(step, ratios), out=scaled)
        scale = scale * step
    return projected, solved


def mix(ratios: Tensor, public: Tensor, radius: float, out: Tensor | None = None) -> Tensor:
    """Returns lambda p_i + (1 - lambda) p0 with the largest lambda in [0, 1] inside the ball, in closed form.

    See `clip` for the arguments and the result.
    """
    low, high = math.exp(-radius), math.exp(radius)
    inside = torch.add(ratios, 1 - public.sign(), out=out)  # dropped tokens count as equal in both
    largest, smallest = inside.amax(dim=1, keepdim=True), inside.amin(dim=1, keepdim=True)
    share = torch.minimum((high - 1) / (largest - 1).clamp_min(0), (1 - low) / (1 - smallest).clamp_min(0))
    share = share.clamp_(max=1)
    return inside.mul_(share).add_(1 - share).clamp_(low, high).mul_(public)


def defined(public: Reals, row: Reals, radius: float, by: Projection) -> Reals:
    """Computes the projection by its definition with a root search, float64 [V], for audits of `clip` and `mix`.

    Args:
        public: float64 [V], probabilities of the public model.
        row: float64 [V], probabilities of the part.
    """
    public, row = public / public.sum(), row / row.sum()
    low, high = math.exp(-radius), math.exp(radius)
    ratios = row / public
    if by == "mix":
        room = [(high - 1) / (ratios.max() - 1), (1 - low) / (1 - ratios.min())] if ratios.max() > 1 else [1.0]
        return np.asarray(public + min(1.0, *room) * (row - public))
    scale = bisect(lambda log: float(public @ np.clip(np.exp(log) * ratios, low, high)) - 1, -100.0, 100.0, xtol=1e-13)
    return np.asarray(public * np.clip(math.exp(scale) * ratios, low, high))
