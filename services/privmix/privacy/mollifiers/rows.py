"""Passes over rows of a vocabulary: shaping, and the moments and sums of clipped ratios.

On a CPU `rows.cpp` does the operations of a pass together, while the row is in the cache, and on a GPU `rows_triton`.
Without a compiler, or without Triton, torch's operators do the same one after another; results differ by rounding. Each
pass is the same for every row, whatever it holds. On a CPU a row's numbers depend on the row and p0 alone, to the last
bit: neither on the rows beside it nor on the number of threads. So torch's `matmul` and `exp2` are not used there:
their kernels round a row in another order, and a token at a block's end otherwise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privmix.foundation import compiled
from privmix.foundation.lazily import torch
from privmix.privacy.mollifiers.blocks import powers_of_two, scratch, totals

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cpp")

logger = logging.getLogger(__name__)

# A smaller mass of a part on the kept tokens counts as none, because float32 cannot resolve it.
_LEAST_MASS = 2.0**-100

# Of a ratio in a logarithm. Every clip is far above it. On a CPU the logarithm of 0 takes a hundred times as long as
# another one, so without it the time of a step would tell what a part says.
LEAST_RATIO = 2.0**-120

# Ratios below 2^-110 count as 0 while a scale is sought.
_SMALLEST_BITS = 110


def shape_parts(log_p: Tensor, public: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Writes the ratios u proportional to exp2(scale log_p) / p0, with mean 1 under p0, and 0 where p0 is 0.

    A row with NaN or +inf, or without mass where p0 is not 0, becomes 1 there: a row of p0.

    Args:
        log_p: [s, n, V], natural log-probabilities of n parts for each of s sequences. A row may lack a constant, as
            logits do.
        public: float32 [s, V], p0.
        scales: float32 [s].
        out: float32 [s, n, V], which may be ``log_p``.
    """
    if kernels := _kernels(log_p, (torch.bfloat16, torch.float16)):
        return kernels.shape_parts(log_p, public, scales, out)  # type: ignore[no-any-return]
    # Dropped tokens: minus infinity.
    bits = public.clamp(min=LEAST_RATIO).log2_().masked_fill_(public == 0, math.inf)
    if operators := _operators(log_p, (torch.bfloat16,)):
        operators.shape_parts(log_p, public.contiguous(), bits, scales, out)
        return out
    p0 = public[:, None]
    u = torch.mul(log_p, scales[:, None, None], out=out).sub_(bits[:, None])
    u -= u.amax(dim=-1, keepdim=True)  # so no ratio overflows, and not all of them vanish
    means = totals(torch.mul(powers_of_two(u, u), p0, out=scratch("inner", u)))
    usable = means.isfinite() & (means > _LEAST_MASS)
    u.mul_(torch.where(usable, 1 / means, 0.0)).nan_to_num_(0.0)
    return u.mul_(p0.sign()).addcmul_(p0.sign(), (~usable).to(u.dtype))


def clipped_means(rows: Tensor, public: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Returns the means of clipped rows under p0, float32 [s, n].

    Args:
        rows: float32 [s, n, V].
        public: float32 [s, V], p0.
        low, high: float32 [s, n], where each row is clipped.
    """
    if passes := _operators(rows) or _kernels(rows):
        return passes.clipped_means(rows, public, low, high)  # type: ignore[no-any-return]
    return _means(_clipped(rows, low, high), public)


def clipped_moments(rows: Tensor, public: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Returns the means of clipped rows and of their squares under p0, float64 [2, s, n], with sums in float64.

    Args:
        public: float64 [s, V], p0. For the others see `clipped_means`.
    """
    if passes := _operators(rows) or _kernels(rows):
        return passes.clipped_moments(rows, public, low, high)  # type: ignore[no-any-return]
    exact = _exact(rows, low, high)
    squares = torch.mul(exact, exact, out=scratch("squares", exact))
    return torch.stack([_means(exact, public), _means(squares, public)])


def clipped_sums(rows: Tensor, low: Tensor, high: Tensor, scales: Tensor) -> Tensor:
    """Returns the sum of each sequence's clipped rows, each times its scale, float64 [s, V].

    Args:
        scales: float64 [s, n]. For the others see `clipped_means`.
    """
    if operators := _operators(rows):
        sums = torch.zeros((len(rows), rows.shape[2]), dtype=torch.float64)
        operators.add_clipped(sums, rows, low, high, scales)
        return sums
    if kernels := _kernels(rows):
        return kernels.clipped_sums(rows, low, high, scales)  # type: ignore[no-any-return]
    return torch.matmul(scales[:, None, :], _exact(rows, low, high))[:, 0, :]


def summed_steps(ratios: Tensor, centres: Tensor, drawn: Tensor, per_nat: float, most: int) -> Tensor:
    """Returns the sum of each sequence's log-ratios in whole steps, int32 [s, V]; sums of integers are exact.

    Args:
        ratios: float32 [s, n, V].
        centres: float32 [s, n], added to the logarithms of each row.
        drawn: bool [s, n], the rows that count.
        per_nat: the steps in a nat.
        most: where a row is clipped, in steps.
    """
    logs = torch.clamp(ratios, min=LEAST_RATIO, out=scratch("inner", ratios)).log_()
    if operators := _operators(logs):
        sums = torch.zeros((len(logs), logs.shape[2]), dtype=torch.int32)
        operators.add_steps(sums, logs, centres, drawn.contiguous(), per_nat, most)
        return sums
    logs.add_(centres[:, :, None]).mul_(per_nat).clamp_(-most, most).round_()
    steps = scratch("rows", logs, torch.int32).copy_(logs).mul_(drawn[:, :, None])
    return steps.sum(dim=1, dtype=torch.int32)


def centred_steps(
    log_p: Tensor, public: Tensor, scales: Tensor, drawn: Tensor, radius: float, slope: float, per_nat: float, most: int
) -> Tensor | None:
    """Returns the sum of each sequence's centred log-ratios in whole steps, from logits, int32 [S, V].

    It is `shape_parts`, two steps to the centre of each row (`privmix.privacy.protocols.exponential`) and
    `summed_steps` in one, without anything of the rows' size between them. None where only torch's operators are: then
    call those, which do the same up to rounding.

    Args:
        log_p, public, scales: see `shape_parts`.
        drawn, per_nat, most: see `summed_steps`.
        radius: where log-ratios are clipped for the steps to the centre, in nats.
        slope: the largest quotient of two steps that counts, below 1.
    """
    kernels = _kernels(log_p, (torch.bfloat16, torch.float16))
    return kernels.centred_steps(log_p, public, scales, drawn, radius, slope, per_nat, most) if kernels else None


def clip_scales(ratios: Tensor, public: Tensor, radius: float) -> Tensor | None:
    """Returns for each row the s for which p0 clamp(s u, e^-radius, e^radius) sums to 1, nearly, float32 [..., 1].

    None where only torch's operators are, and for rows of another form: `projection.clip` then finds it.

    Args:
        ratios: float32 [C, V] or [s, n, V].
        public: float32, p0: [V] or [C, V], or [s, 1, V].
        radius: in nats.
    """
    if ratios.ndim == 3 and public.ndim == 3 and public.shape[1] == 1:
        rows, p0 = ratios, public[:, 0]
    elif ratios.ndim == 2 and public.ndim == 1:
        rows, p0 = ratios[None], public[None]
    elif ratios.ndim == 2 and public.shape == ratios.shape:
        rows, p0 = ratios[:, None], public
    else:
        return None
    if operators := _operators(rows):
        low, high = math.exp(-radius), math.exp(radius)
        # A sum is at most L + s, and a smaller ratio than the least counts as 0.
        least, most = math.log2(-math.expm1(-radius)), math.log2(high) + _SMALLEST_BITS
        scales: Tensor = operators.clip_scales(rows, p0.contiguous(), low, high, least, most)
        return scales.view(*ratios.shape[:-1], 1)
    kernels = _kernels(rows) if ratios.ndim == 3 else None
    return kernels.clip_scales(rows, p0, radius) if kernels else None


def prepare(device: torch.device | None = None) -> None:
    """Builds the passes for a device, if needed, and loads them; by default those for a CPU."""
    if device is None or device.type == "cpu":
        compiled.operators(SOURCE)
    elif (kernels := _triton()) is not None:
        kernels.prepare(device)


def _kernels(rows: Tensor, types: Sequence[torch.dtype] = ()) -> Any | None:
    """Returns `rows_triton` for rows on a GPU that it can read: float32, or one of `types`."""
    return _triton() if rows.is_cuda and _fits(rows, types) else None


def _fits(rows: Tensor, types: Sequence[torch.dtype]) -> bool:
    return rows.dtype in (torch.float32, *types) and rows.stride(2) == 1


@cache
def _triton() -> Any | None:
    try:
        from privmix.privacy.mollifiers import rows_triton
    except ImportError as error:
        logger.warning("rows_triton.py is not used, so rows take longer: Triton cannot be imported (%s)", error)
        return None
    return rows_triton


def _operators(rows: Tensor, types: Sequence[torch.dtype] = ()) -> Any | None:
    return compiled.operators(SOURCE) if rows.device.type == "cpu" and _fits(rows, types) else None


def _clipped(rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.clamp(rows, low[:, :, None], high[:, :, None], out=scratch("clipped", rows))


def _exact(rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return scratch("exact", rows, torch.float64).copy_(_clipped(rows, low, high))


def _means(rows: Tensor, p0: Tensor) -> Tensor:
    """Returns the means of [s, n, V] under p0 [s, V]: [s, n]. On a CPU it overwrites the rows."""
    if rows.device.type == "cpu":
        return totals(rows.mul_(p0[:, None]))[:, :, 0]
    return torch.matmul(rows, p0[:, :, None])[:, :, 0]
