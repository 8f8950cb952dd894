"""Implements the ratio mollifier: projects a part's distribution into the ball M_c = { r : e^-c p0 <= r <= e^c p0 }.

The released distribution must lie in the ball exactly. So callers pass a radius that is smaller by `slack`, which
covers all rounding between the projection and the integer weights (`mixture`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Self

from privmix.foundation.lazily import torch
from privmix.privacy.mollifiers.blocks import scratch, totals
from privmix.privacy.mollifiers.rows import clip_scales

if TYPE_CHECKING:
    from torch import Tensor

Projection = Literal["clip", "mix"]

# The accuracy of a projected row's sum before its last correction, in the units of probability. An error of the scale s
# costs its square in KL.
TOLERANCE = 2.0**-17
# Ratios are at most 2**36; those below 2**-110 count as 0 for the first scale.
_SMALLEST_EXPONENT, _MAX_EXPONENT = -110, 37
_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127
# Buckets of ratios are at most half a radius wide, within these numbers of bits of the mantissa.
_LEAST_BITS, _MAX_BITS = 3, 6
# Replaces 0 as a divisor; the resulting step is always outside the bracket.
_NOTHING = 1e-30
_NEWTON_STEPS = 4


def _root(ratios: Tensor, public: Tensor, radius: float, projected: Tensor) -> Tensor:
    """Returns the scale of each row at which its sum is nearly 1, float32 [..., 1]. Overwrites ``projected``."""
    low, high = math.exp(-radius), math.exp(radius)
    applied = scratch("inner", ratios)
    scale, below, above = _bracket(ratios, public, radius)
    for _ in range(_NEWTON_STEPS):
        torch.mul(ratios, scale, out=applied)
        torch.clamp(applied, low, high, out=projected).mul_(public)
        missing = 1 - totals(projected)
        # The derivative of clamp in one pass: keeps values that are not clamped and sets the others to 0.
        torch.ops.aten.hardtanh_backward.grad_input(projected, applied, low, high, grad_input=projected)
        newton = scale * (1 + missing / totals(projected).clamp_(min=_NOTHING))
        below, above = torch.where(missing > 0, scale, below), torch.where(missing < 0, scale, above)
        usable = (newton >= below) & (newton <= above)
        scale = torch.where(usable, newton, below.sqrt() * above.sqrt())
    return scale


def clip(ratios: Tensor, public: Tensor, radius: float, out: Tensor | None = None) -> Tensor:
    """Returns the member of the ball that is closest to p_i in KL: p0 clamp(s u, L, H), with s such that it sums to 1.

    The sum is monotone and piecewise linear in s. Parts of its range bracket the root (`rows.clip_scales`), or, with
    torch's operators alone, a histogram of the ratios does; a fixed number of Newton steps follow. What then is missing
    from 1 is taken from the ball's upper bound, H p0, and what is too much from its lower: a convex combination of two
    members of the ball. So the same operations run for all rows, and the result is in the ball and sums to 1, however
    near the steps came.

    Args:
        ratios: float32 [..., V], u = p_i / p0, contiguous.
        public: float32, p0, which broadcasts to the shape of ``ratios``.
        radius: c in nats.
        out: float32 [..., V], the tensor for the result.

    Returns:
        float32 [..., V], sums of 1 up to rounding.
    """
    low, high = math.exp(-radius), math.exp(radius)
    projected = torch.empty_like(ratios) if out is None else out
    scale = clip_scales(ratios, public, radius)
    if scale is None:
        scale = _root(ratios, public, radius, projected)
    torch.mul(ratios, scale, out=projected).clamp_(low, high).mul_(public)
    sums = totals(projected)
    bound = torch.where(sums < 1, high, low)
    weight = ((1 - sums) / (bound - sums)).clamp_(0, 1)
    return torch.addcmul(projected.mul_(1 - weight), public, weight * bound, out=projected)


def _bracket(ratios: Tensor, public: Tensor, radius: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a scale near the root, and scales below and above it, float32 [..., 1], from a histogram of the ratios.

    A bucket's ratios count as its geometric mean. Candidates s are those for which L / s is the bound of a bucket.
    """
    buckets = _Buckets.of(radius, ratios.device)
    low, high = math.exp(-radius), math.exp(radius)
    numbers = torch.bitwise_right_shift(ratios.view(torch.int32), buckets.shift).clamp_(max=len(buckets.means) - 1)
    masses = torch.zeros((*ratios.shape[:-1], len(buckets.means)), device=ratios.device)
    masses.scatter_add_(-1, numbers.long(), public.expand_as(ratios))
    before = torch.nn.functional.pad(masses.cumsum(dim=-1), (1, 0))
    weighted = torch.nn.functional.pad(masses.mul_(buckets.means).cumsum(dim=-1), (1, 0))
    sums = (weighted[..., buckets.ends] - weighted[..., :-1]) * buckets.scales
    sums += low * before[..., :-1] + high * (before[..., -1:] - before[..., buckets.ends])
    # Scales fall from bucket to bucket, and the sums with them: the root lies between two neighbours.
    first = (sums >= 1).sum(dim=-1, keepdim=True).clamp_(1, sums.shape[-1] - 1) - 1
    larger, smaller = sums.gather(-1, first), sums.gather(-1, first + 1)
    fraction = ((larger - 1) / (larger - smaller).clamp_(min=_NOTHING)).clamp_(0, 1)
    above, below = buckets.scales[first], buckets.scales[first + 1]
    return above + fraction * (below - above), below / buckets.width, above * buckets.width


@dataclass(frozen=True)
class _Buckets:
    """Describes buckets of ratios, whose number is the leading bits of the float32.

    Attributes:
        shift: the bits of a float32 that a bucket's number leaves out.
        means: float32 [B], the geometric mean of each bucket's bounds; 0 for ratios that count as 0.
        scales: float32 [B], s with ``L / s`` = the bucket's lower bound.
        ends: int64 [B], the first bucket that s moves to H or above.
        width: the quotient of a bucket's bounds, at most.
    """

    shift: int
    means: Tensor
    scales: Tensor
    ends: Tensor
    width: float

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, radius: float, device: torch.device) -> Self:
        bits = min(max(_LEAST_BITS, math.ceil(math.log2(2 * math.log(2) / radius))), _MAX_BITS)
        shift = _MANTISSA_BITS - bits
        count = (_MAX_EXPONENT + _EXPONENT_BIAS) << bits
        bounds = (torch.arange(count + 1, dtype=torch.int32) << shift).view(torch.float32).double()
        vanishing = bounds[1:] <= 2.0**_SMALLEST_EXPONENT
        means = torch.where(vanishing, 0.0, (bounds[:-1] * bounds[1:]).sqrt())
        scales = math.exp(-radius) / bounds[:-1].clamp(min=2.0**_SMALLEST_EXPONENT)
        ends = torch.searchsorted(means, math.exp(radius) / scales).clamp_(max=count)
        return cls(shift, means.float().to(device), scales.float().to(device), ends.to(device), 1 + 2.0**-bits)


def mix(ratios: Tensor, public: Tensor, radius: float, out: Tensor | None = None) -> Tensor:
    """Returns lambda p_i + (1 - lambda) p0 with the largest lambda in [0, 1] inside the ball, in closed form.

    See `clip` for the arguments and the result.
    """
    low, high = math.exp(-radius), math.exp(radius)
    inside = torch.add(ratios, 1 - public.sign(), out=out)  # dropped tokens count as equal in both
    largest, smallest = inside.amax(dim=-1, keepdim=True), inside.amin(dim=-1, keepdim=True)
    weight = torch.minimum((high - 1) / (largest - 1).clamp_min(0), (1 - low) / (1 - smallest).clamp_min(0))
    weight = weight.clamp_(max=1)
    return inside.mul_(weight).add_(1 - weight).clamp_(low, high).mul_(public)
