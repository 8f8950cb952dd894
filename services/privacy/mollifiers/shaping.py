"""Sampling options, applied to every distribution before projection, with the kept tokens chosen from p0 alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.privacy.mollifiers.blocks import column, row_sums, rows_at_once, scratch
from services.privacy.protocol import Answers

# Tokens less likely than this under the shaped public model are dropped. So every kept probability is a multiple of
# 2**-60 in float32, which makes the public model's integer weights exact (`mixture`), and no ratio is above 2**36.
SUPPORT_FLOOR = 2.0**-36
# A part with less of its mass than this on the kept tokens has none, as far as float32 can tell.
_LEAST_MASS = 2.0**-100
_NUCLEUS_START = 1024
_BITS = 1 / math.log(2)  # bits per nat


@dataclass(frozen=True)
class SamplingOptions:
    """Options of one sequence: temperature > 0, nucleus mass top_p in (0, 1], top_k tokens (None keeps all)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature must be a finite number above 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie above 0 and at most 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None to keep every token, got {self.top_k}")


def shape(
    public: Tensor,
    parts: Tensor,
    models: Sequence[Sequence[int]],
    options: Sequence[SamplingOptions] | SamplingOptions = SamplingOptions(),
    *,
    overwrite_parts: bool = False,
) -> Answers:
    """From log-probabilities to the answers that a protocol works on.

    Temperature, then the top_k and the top_p most likely tokens of the public model (all that tie with the last one
    stay), then its support floor; the parts are restricted to the tokens kept. A part's row that holds NaN or +inf, or
    has no mass on them, counts as the public model itself: an error must not depend on what a part said.

    Args:
        public: [S, V], natural log-probabilities of the public model, one row a sequence.
        parts: [R, V], those of the models asked, the rows of each sequence together, in the order of ``models``.
        models: for each sequence the indices of the models asked.
        options: one for each sequence, or one for all.
        overwrite_parts: let the ratios take the memory of ``parts``, a float32 tensor that nobody reads again.

    Raises:
        ValueError: shapes do not match, or a public row holds NaN or +inf, or has no mass.
    """
    sequences, vocabulary = public.shape
    each = (options,) * sequences if isinstance(options, SamplingOptions) else tuple(options)
    if len(each) != sequences:
        raise ValueError(f"options has {len(each)} entries, public has {sequences} rows")
    if len(parts) and parts.shape[1] != vocabulary:
        raise ValueError(f"parts has {parts.shape[1]} columns, public has {vocabulary}")
    answers = Answers(
        public=torch.empty((sequences, vocabulary), dtype=torch.float32, device=public.device),
        ratios=parts if overwrite_parts else torch.empty_like(parts, dtype=torch.float32),
        models=tuple(map(tuple, models)),
    )
    spans = list(answers.spans())
    at_once = rows_at_once(answers.public)
    for start in range(0, sequences, at_once):
        block = slice(start, start + at_once)
        inverses = _shape_public(public[block], each[block], answers.public[block])
        for s, inverse in enumerate(inverses, start):
            first, last = spans[s]
            _shape_parts(parts[first:last], answers.public[s], inverse, each[s].temperature, answers.ratios[first:last])
    return answers


def _shape_public(log_p: Tensor, options: Sequence[SamplingOptions], out: Tensor) -> Tensor:
    """Writes p0 [B, V]; returns log2(1 / p0) up to a constant of the row, minus infinity for the tokens dropped.

    Powers of two, which PyTorch computes several times faster than those of e.
    """
    logs = scratch("logs", out)
    torch.mul(log_p, column(np.array([_BITS / each.temperature for each in options]), out), out=logs)
    largest = logs.amax(dim=1, keepdim=True)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("a row of the public model's log-probabilities holds NaN or +inf, or has no mass")
    logs -= largest
    for row, each in zip(logs, options, strict=True):
        if each.top_k is not None and each.top_k < len(row):
            _drop_below(row, float(row.topk(each.top_k).values[-1]), -math.inf)
        if each.top_p < 1.0:
            _drop_below(row, _nucleus_floor(row, each.top_p), -math.inf)
    torch.exp2(logs, out=out)
    out *= 1 / out.sum(dim=1, keepdim=True)
    _drop_below(out, SUPPORT_FLOOR, 0.0)
    out *= 1 / out.sum(dim=1, keepdim=True)
    kept = torch.sign(out, out=scratch("inner", out))
    return logs.div_(kept).neg_().nan_to_num_(posinf=-math.inf)  # dropped: a negative number over 0


def _drop_below(values: Tensor, least: float, dropped: float) -> None:
    below = np.nextafter(np.float32(least), np.float32(-np.inf))
    torch.threshold_(values, float(below), dropped)


def _nucleus_floor(logs: Tensor, mass: float) -> float:
    """The least log in the smallest set of the largest that holds ``mass`` of the total."""
    wanted = mass * float(torch.exp2(logs).sum(dtype=torch.float64))
    count = min(_NUCLEUS_START, len(logs))
    while True:
        largest = logs.topk(count).values
        inside = int((largest.double().exp2_().cumsum(0) < wanted).sum())
        if inside < count or count == len(logs):
            return float(largest[min(inside, count - 1)])
        count = min(8 * count, len(logs))


def _shape_parts(log_p: Tensor, p0: Tensor, log2_inverse: Tensor, temperature: float, out: Tensor) -> None:
    """Rows of one sequence: u proportional to p_i^(1/T) / p0, of mean 1 under p0."""
    at_once = rows_at_once(out)
    for start in range(0, len(out), at_once):
        u = out[start : start + at_once]
        torch.add(log2_inverse, log_p[start : start + at_once], alpha=_BITS / temperature, out=u)
        if temperature < 1:  # else no ratio overflows, and not all of them vanish
            u -= u.amax(dim=1, keepdim=True)
        means = row_sums(torch.mul(u.exp2_(), p0, out=scratch("inner", u)))
        usable = np.isfinite(means) & (means > _LEAST_MASS)
        u *= column(1 / np.where(usable, means, 1), u)
        if not usable.all():
            torch.where(column(usable, u) > 0, u, p0.sign(), out=u)
