"""Clips vectors to an L2 norm and adds them up exactly, so that one of them moves the sum by at most the clip.

    total = sum(clipped(vector, clip) for vector in vectors)    # int64, in grains of clip / GRAINS
    noised(total, multiplier)                                   # float64, in standard deviations of the noise

*Claim.* The value of `clipped` has an L2 norm of at most `GRAINS`, and sums of fewer than 2^31 of them are exact in
int64, in any order. So if a vector and its value do not depend on the other vectors, one that is added, or removed,
moves the sum by its own value and by nothing else: by at most the clip, in exact arithmetic, not up to rounding.

*Proof.* A vector g has d <= 2^26 coordinates in float32, so their squares neither overflow nor underflow in float64.
Whatever the order of the sum, its relative error is at most d 2^-53 <= 2^-27 and a little, so the computed norm n is at
least |g| (1 - 2^-26). The scale s is `GRAINS (1 - 2^-20) / max(n, clip)`, which is finite because a clip is at least
`MIN_CLIP`, and each product with it is rounded: each by a factor of at most 1 + 2^-53. Truncation moves each coordinate
towards 0. So the value's norm is at most `GRAINS (1 - 2^-20) (1 + 2^-51) |g| / max(n, clip) <= GRAINS`. A coordinate of
it is at most 2^32, and 2^31 of them stay below 2^63.

*Noise.* The noise is rounded to whole grains. For an integer t and a real number x, `t + round(x) = round(t + x)`: what
is released is rounded from the sum with noise on the real numbers, and its lowest bits tell nothing of the sum (Mironov
2012). What remains to be assumed is that the normal numbers, which are made of two times 53 random bits, are as good as
real ones.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from privmix.foundation.lazily import torch
from privmix.foundation.units import MIN_CLIP
from privmix.privacy.sampling.randomness import normal

if TYPE_CHECKING:
    from torch import Tensor

GRAINS = 2**32
"""A clip in grains."""
_MARGIN = 2.0**-20
"""What a clipped vector's norm stays below the clip, relatively; the rounding of its scale fits into it."""
MAX_COORDINATES = 2**26
"""The largest number of coordinates for which the proof holds."""


def clipped(vectors: Tensor, clip: float) -> Tensor:
    """Returns vectors, each scaled down to an L2 norm of at most `clip`, in whole grains: int64 [..., d], on the CPU.

    A vector that is not finite counts as 0: an error would reveal that it is there. Where several are given, the bits
    of one may depend on how many there are, as those of any operation may: their number must be public.

    Args:
        vectors: float32 [..., d].
        clip: finite, and at least `MIN_CLIP`.

    Raises:
        ValueError: the vectors are not float32, or have more than `MAX_COORDINATES` coordinates; the clip is too small.
    """
    if not MIN_CLIP <= clip < math.inf:
        raise ValueError(f"clip must be a finite number of at least {MIN_CLIP:g}, got {clip:g}")
    if vectors.dtype != torch.float32 or vectors.shape[-1] > MAX_COORDINATES:
        raise ValueError(
            f"vectors must be float32 of at most {MAX_COORDINATES} coordinates, got {vectors.dtype} "
            f"{list(vectors.shape)}"
        )
    exact = vectors.cpu().double()
    exact = torch.where(exact.isfinite().all(dim=-1, keepdim=True), exact, 0.0)
    norms = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    scales: Tensor = GRAINS * (1 - _MARGIN) / norms.clamp(min=clip)
    return (exact * scales).trunc().to(torch.int64)


def noised(total: Tensor, multiplier: float) -> Tensor:
    """Adds Gaussian noise to a sum of clipped vectors.

    Args:
        total: int64 [d], in grains.
        multiplier: the standard deviation of the noise in each coordinate, in clips.

    Returns:
        float64 [d], in standard deviations of the noise. So no divisor depends on the number of vectors.
    """
    deviation = multiplier * GRAINS
    noise = torch.from_numpy(normal(total.numel())) * deviation
    return (total + noise.round().to(torch.int64)).double() / deviation
