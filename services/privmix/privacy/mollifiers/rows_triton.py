"""The passes of `rows` as Triton kernels, for rows on a GPU.

A kernel does what torch's operators (`rows`) do in several passes, and keeps nothing of the size of the rows. It has
one program for a row, or one for a block of tokens of a sequence. No program branches on what a row holds, adds with
atomics or waits for the host; so a row's numbers are the same in every batch, and a CUDA graph can capture the passes.
Results differ from torch's by rounding.

No guarantee rests on that rounding (`services/privmix/privacy/README.md`):

- The exponential mechanism, Theorem 2: a score may be *any* function of the part's row and p0 with values in
  [-c, c]. `sum_steps` clamps each row's score as an integer, to at most ``most`` steps either way, before it adds the
  row; integers add exactly. Whatever the floats before the clamp are, the token's law keeps its bounded range.
- PMixed, Theorem 1: `clip_scales` finds a number, and `projection.clip` makes a member of the ball of any number, by
  torch's operators (`mixture.slack`).
- Individual budgets, Theorem 4: tilt and charge are computed from ratios in memory, which every pass reads again. A
  clamp of float32 is exact, and moments and sums are in float64, as in torch's passes.

Written for Triton 3.6 and later. Shapes: S sequences, n rows of each, V tokens. A row's tokens lie together
(``stride(2) == 1``), in any float type; the rows themselves may lie apart, such as those of [S, 1 + n, V] without the
public one.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LN2 = tl.constexpr(0.6931471805599453)
_INF = tl.constexpr(float("inf"))

# Tokens that a program of a row reads at once: 16 for each of its threads, so that enough reads are under way.
_ROW, _ROW_WARPS = 8192, 16
# Tokens of a program that adds rows: enough programs for all processors, even with few sequences.
_TILE, _TILE_WARPS = 1024, 4

# Ratios are at most 2^37; those below 2^-110 count as 0 while a scale is sought (`projection`).
_MAX_BITS, _SMALLEST_BITS = 37, 110
# Each pass divides the range of the logarithm of a scale by 9: three leave some 0.2 bits of 150.
_SECTIONS, _CANDIDATES, _SECTION = tl.constexpr(3), tl.constexpr(8), tl.constexpr(2048)
_NEWTON_STEPS = tl.constexpr(4)
_NOTHING = tl.constexpr(1e-30)  # replaces 0 as a divisor; the step is outside the bracket then


def shape_parts(log_p: Tensor, public: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Writes ratios; see `rows.shape_parts`. Reads the rows twice."""
    _for_each_row(_shape_rows, log_p, public.contiguous(), scales.contiguous(), out, *out.stride()[:2])
    return out


def clipped_means(rows: Tensor, public: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Returns the means of clipped rows under p0, float32 [S, n]; see `rows.clipped_means`."""
    means = torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device)
    _for_each_row(_sum_clipped, rows, public.contiguous(), low.contiguous(), high.contiguous(), means)
    return means


def clipped_moments(rows: Tensor, public: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Returns first and second moments of clipped rows, float64 [2, S, n]; see `rows.clipped_moments`."""
    moments = torch.empty((2, *rows.shape[:2]), dtype=torch.float64, device=rows.device)
    _for_each_row(_sum_moments, rows, public.contiguous(), low.contiguous(), high.contiguous(), *moments)
    return moments


def clipped_sums(rows: Tensor, low: Tensor, high: Tensor, scales: Tensor) -> Tensor:
    """Returns sums of scaled clipped rows, float64 [S, V], added in the order of the rows; see `rows.clipped_sums`."""
    sums = torch.empty((len(rows), rows.shape[2]), dtype=torch.float64, device=rows.device)
    _for_each_tile(_add_clipped, rows, low.contiguous(), high.contiguous(), scales.contiguous(), sums)
    return sums


def centred_steps(
    log_p: Tensor, public: Tensor, scales: Tensor, drawn: Tensor, radius: float, slope: float, per_nat: float, most: int
) -> Tensor:
    """Returns the sums of centred log-ratios in whole steps, int32 [S, V]; see `rows.centred_steps`.

    Reads the rows four times, of which later ones find much in the GPU's cache, and writes nothing of their size.
    """
    public, scales = public.contiguous(), scales.contiguous()
    scores = torch.empty((*log_p.shape[:2], 4), dtype=torch.float32, device=log_p.device)
    _for_each_row(_centre_rows, log_p, public, scales, scores, radius, slope)
    sums = torch.empty((len(log_p), log_p.shape[2]), dtype=torch.int32, device=log_p.device)
    _for_each_tile(_sum_steps, log_p, public, scales, scores, drawn.contiguous(), sums, per_nat, float(most), most)
    return sums


def clip_scales(ratios: Tensor, public: Tensor, radius: float) -> Tensor:
    """Returns the scale at which each row's clipped sum is nearly 1, float32 [S, n, 1]; see `rows.clip_scales`.

    The sum rises with the scale. Sections of its range, then Newton's steps, each as many for every row.
    """
    scales = torch.empty((*ratios.shape[:2], 1), dtype=torch.float32, device=ratios.device)
    low, high = math.exp(-radius), math.exp(radius)
    least, most = math.log2(low) - _MAX_BITS, math.log2(high) + _SMALLEST_BITS
    _for_each_row(_find_scales, ratios, public.contiguous(), scales, low, high, least, most)
    return scales


def prepare(device: torch.device) -> None:
    """Compiles the kernels for float32 rows that lie apart, as an engine's do, or finds them in Triton's cache."""
    made = torch.zeros((2, 3, _ROW), device=device)
    log_p, public, ones = made[:, 1:], made[:, 0] + 1 / _ROW, torch.ones((2, 2), device=device)
    ratios = shape_parts(log_p, public, ones[0], torch.empty((2, 2, _ROW), device=device))
    clipped_means(ratios, public, ones, ones)
    clipped_moments(ratios, public.double(), ones, ones)
    clipped_sums(ratios, ones, ones, ones.double())
    clip_scales(ratios, public, 1.0)
    centred_steps(log_p, public, ones[0], ones.bool(), 1.0, 0.5, 1.0, 2)


def _for_each_row(kernel: Any, rows: Tensor, *arguments: Any) -> None:
    """Runs one program for each row of [S, n, V]."""
    sequences, count, vocabulary = rows.shape
    with torch.cuda.device_of(rows):
        kernel[sequences, count](
            rows, vocabulary, rows.stride(0), rows.stride(1), *arguments, block=_ROW, num_warps=_ROW_WARPS
        )


def _for_each_tile(kernel: Any, rows: Tensor, *arguments: Any) -> None:
    """Runs one program for each block of tokens of a sequence, which adds the sequence's rows one after another."""
    sequences, count, vocabulary = rows.shape
    with torch.cuda.device_of(rows):
        kernel[sequences, triton.cdiv(vocabulary, _TILE)](
            rows, vocabulary, rows.stride(0), rows.stride(1), count, *arguments, block=_TILE, num_warps=_TILE_WARPS
        )


@triton.jit
def _log_weights(row, x, inside, scale):
    """Returns a row's logits in bits over the temperature; minus infinity beyond the vocabulary."""
    return tl.load(row + x, mask=inside, other=-_INF).to(tl.float32) * scale


@triton.jit
def _mass(row, p0, scale, vocabulary, block: tl.constexpr):
    """Returns a row's largest logit in bits on the kept tokens, its mass there over 2^largest, and whether it has any.

    The mass of each lane is relative to the lane's own largest logit, so that one pass finds both.
    """
    largest = tl.full((block,), -_INF, tl.float32)
    mass = tl.zeros((block,), tl.float32)
    broken = tl.zeros((block,), tl.int32)
    for start in range(0, vocabulary, block):
        x = start + tl.arange(0, block)
        bits = _log_weights(row, x, x < vocabulary, scale)
        p = tl.load(p0 + x, mask=x < vocabulary, other=0.0)
        broken |= tl.where(bits < _INF, 0, 1)  # NaN and infinity, whether the token is kept or not
        bits = tl.where(p > 0, bits, -_INF)
        larger = tl.maximum(largest, bits)
        base = tl.where(larger == -_INF, 0.0, larger)
        mass = mass * tl.exp2(largest - base) + tl.exp2(bits - base)
        largest = larger
    top = tl.max(largest, 0)
    base = tl.where(top == -_INF, 0.0, top)
    total = tl.sum(mass * tl.exp2(largest - base), 0)
    return base, total, (tl.sum(broken, 0) == 0) & (total > 0) & (total < _INF)


@triton.jit
def _shape_rows(rows, vocabulary, row_s, row_i, public, scales, out, out_s, out_i, block: tl.constexpr):
    s, i = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, p0 = rows + s * row_s + i * row_i, public + s * vocabulary
    ratios = out + s * out_s + i * out_i
    scale = tl.load(scales + s)
    top, mass, usable = _mass(row, p0, scale, vocabulary, block)
    share = 1 / tl.where(usable, mass, 1.0)
    for start in range(0, vocabulary, block):
        x = start + tl.arange(0, block)
        p = tl.load(p0 + x, mask=x < vocabulary, other=0.0)
        bits = _log_weights(row, x, x < vocabulary, scale)
        ratio = tl.exp2((bits - top) - tl.log2(tl.where(p > 0, p, 1.0))) * share
        ratio = tl.where(usable, ratio, 1.0)  # a row of p0
        tl.store(ratios + x, tl.where(p > 0, ratio, 0.0), mask=x < vocabulary)


@triton.jit
def _centre_rows(rows, vocabulary, row_s, row_i, public, scales, scores, radius, slope, block: tl.constexpr):
    """Writes for each row: its largest logit in bits, log2 of its mass, its centre in nats, and 1 if it is usable."""
    s, i = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, p0 = rows + s * row_s + i * row_i, public + s * vocabulary
    scale = tl.load(scales + s)
    top, mass, usable = _mass(row, p0, scale, vocabulary, block)
    log_mass = tl.log2(tl.where(usable, mass, 1.0))
    first = top * 0.0
    second = first
    for step in tl.static_range(2):
        low, high = tl.exp(-radius - first), tl.exp(radius - first)
        clipped = tl.zeros((block,), tl.float32)
        for start in range(0, vocabulary, block):
            x = start + tl.arange(0, block)
            p = tl.load(p0 + x, mask=x < vocabulary, other=0.0)
            probability = tl.exp2((_log_weights(row, x, x < vocabulary, scale) - top) - log_mass)
            clipped += tl.minimum(tl.maximum(probability, low * p), high * p)  # p0 clip(p_i / p0)
        mean = tl.log(tl.sum(clipped, 0)) + first
        if step == 0:
            first = mean
        else:
            second = mean
    shrinks_by = (second - first) / tl.where(first == 0, 1.0, first)
    shrinks_by = tl.minimum(tl.maximum(shrinks_by, 0.0), slope)
    centre = tl.minimum(tl.maximum(first / (1 - shrinks_by), -radius), radius)
    score = scores + (s * tl.num_programs(1) + i) * 4
    tl.store(score, top)
    tl.store(score + 1, log_mass)
    tl.store(score + 2, tl.where(usable, centre, 0.0))
    tl.store(score + 3, tl.where(usable, 1.0, 0.0))


@triton.jit(do_not_specialize=["count"])
def _sum_steps(
    rows, vocabulary, row_s, row_i, count, public, scales, scores, drawn, sums, per_nat, furthest, most,
    block: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1) * block + tl.arange(0, block)
    p = tl.load(public + s * vocabulary + x, mask=x < vocabulary, other=0.0)
    kept = p > 0
    p0_bits = tl.log2(tl.where(kept, p, 1.0))
    scale = tl.load(scales + s)
    row = rows + s * row_s
    total = tl.zeros((block,), tl.int32)
    for i in range(count):
        at = s * count + i
        top, log_mass = tl.load(scores + at * 4), tl.load(scores + at * 4 + 1)
        centre, usable = tl.load(scores + at * 4 + 2), tl.load(scores + at * 4 + 3)
        bits = _log_weights(row, x, x < vocabulary, scale)
        nats = ((bits - top) - (log_mass + p0_bits)) * _LN2
        steps = (tl.where(usable > 0, nats, 0.0) + centre) * per_nat
        steps = tl.where(kept, steps, -furthest)  # the ratio of a dropped token is 0
        whole = tl.floor(tl.minimum(tl.maximum(steps, -furthest), furthest) + 0.5).to(tl.int32)
        whole = tl.minimum(tl.maximum(whole, -most), most)  # the bound that Theorem 2 asks for, in integers
        total += tl.where(tl.load(drawn + at), whole, 0)
        row += row_i
    tl.store(sums + s * vocabulary + x, total, mask=x < vocabulary)


@triton.jit
def _sum_clipped(rows, vocabulary, row_s, row_i, public, lows, highs, means, block: tl.constexpr):
    s, i = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = s * tl.num_programs(1) + i
    row, p0 = rows + s * row_s + i * row_i, public + s * vocabulary
    low, high = tl.load(lows + at), tl.load(highs + at)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, vocabulary, block):
        x = start + tl.arange(0, block)
        value = tl.load(row + x, mask=x < vocabulary, other=0.0)
        p = tl.load(p0 + x, mask=x < vocabulary, other=0.0)
        total += tl.minimum(tl.maximum(value, low), high) * p
    tl.store(means + at, tl.sum(total, 0))


@triton.jit
def _sum_moments(rows, vocabulary, row_s, row_i, public, lows, highs, means, seconds, block: tl.constexpr):
    s, i = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = s * tl.num_programs(1) + i
    row, p0 = rows + s * row_s + i * row_i, public + s * vocabulary
    low, high = tl.load(lows + at), tl.load(highs + at)
    mean = tl.zeros((block,), tl.float64)
    second = tl.zeros((block,), tl.float64)
    for start in range(0, vocabulary, block):
        x = start + tl.arange(0, block)
        ratio = tl.load(row + x, mask=x < vocabulary, other=0.0)
        p = tl.load(p0 + x, mask=x < vocabulary, other=0.0)
        value = tl.minimum(tl.maximum(ratio, low), high).to(tl.float64)
        mean += value * p
        second += value * (value * p)
    tl.store(means + at, tl.sum(mean, 0))
    tl.store(seconds + at, tl.sum(second, 0))


@triton.jit(do_not_specialize=["count"])
def _add_clipped(rows, vocabulary, row_s, row_i, count, lows, highs, scales, sums, block: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1) * block + tl.arange(0, block)
    row = rows + s * row_s
    total = tl.zeros((block,), tl.float64)
    for i in range(count):
        at = s * count + i
        low, high, scale = tl.load(lows + at), tl.load(highs + at), tl.load(scales + at)
        ratio = tl.load(row + x, mask=x < vocabulary, other=0.0)
        total += tl.minimum(tl.maximum(ratio, low), high).to(tl.float64) * scale
        row += row_i
    tl.store(sums + s * vocabulary + x, total, mask=x < vocabulary)


@triton.jit
def _find_scales(rows, vocabulary, row_s, row_i, public, scales, low, high, least, most, block: tl.constexpr):
    s, i = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, p0 = rows + s * row_s + i * row_i, public + s * vocabulary
    bottom = least  # log2 of a scale below the root
    width = most - least
    for _ in tl.static_range(_SECTIONS):
        width = width / (_CANDIDATES + 1)
        tried = tl.exp2(bottom + width * (1 + tl.arange(0, _CANDIDATES)))
        masses = tl.zeros((_SECTION, _CANDIDATES), tl.float32)
        for start in range(0, vocabulary, _SECTION):
            x = start + tl.arange(0, _SECTION)
            ratio = tl.load(row + x, mask=x < vocabulary, other=0.0)
            p = tl.load(p0 + x, mask=x < vocabulary, other=0.0)
            masses += tl.minimum(tl.maximum(ratio[:, None] * tried[None, :], low), high) * p[:, None]
        bottom += width * tl.sum(tl.where(tl.sum(masses, 0) < 1, 1, 0), 0)
    below, above = tl.exp2(bottom), tl.exp2(bottom + width)
    scale = tl.exp2(bottom + width / 2)
    for _ in tl.static_range(_NEWTON_STEPS):
        mass = tl.zeros((block,), tl.float32)
        unclipped = tl.zeros((block,), tl.float32)
        for start in range(0, vocabulary, block):
            x = start + tl.arange(0, block)
            applied = tl.load(row + x, mask=x < vocabulary, other=0.0) * scale
            p = tl.load(p0 + x, mask=x < vocabulary, other=0.0)
            mass += tl.minimum(tl.maximum(applied, low), high) * p
            unclipped += tl.where((applied > low) & (applied < high), applied * p, 0.0)
        missing = 1 - tl.sum(mass, 0)
        newton = scale * (1 + missing / tl.maximum(tl.sum(unclipped, 0), _NOTHING))
        below, above = tl.where(missing > 0, scale, below), tl.where(missing < 0, scale, above)
        usable = (newton >= below) & (newton <= above)
        scale = tl.where(usable, newton, tl.sqrt(below) * tl.sqrt(above))
    tl.store(scales + s * tl.num_programs(1) + i, scale)
