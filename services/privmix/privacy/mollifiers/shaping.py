"""Applies sampling options to every distribution before projection. The kept tokens depend on p0 alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from privmix.foundation.lazily import torch
from privmix.privacy.mollifiers import rows
from privmix.privacy.mollifiers.blocks import on_device, powers_of_two, rows_at_once, scratch, totals
from privmix.privacy.protocol import Answers

if TYPE_CHECKING:
    from torch import Tensor

# Tokens with a smaller probability under the shaped public model are dropped. So every kept probability is a multiple
# of 2**-60 in float32, which makes the public model's integer weights exact (`mixture`), and no ratio exceeds 2**36.
SUPPORT_FLOOR = 2.0**-36
_BITS = 1 / math.log(2)  # bits per nat


@dataclass(frozen=True)
class SamplingOptions:
    """Holds the options of one sequence.

    Attributes:
        temperature: above 0.
        top_p: in (0, 1].
        top_k: None keeps all tokens.
        legal: the tokens that may be released: bit i % 8 of byte i // 8 is set for token i, absent bytes are zero. None
            allows all tokens. It must be a function of public data: the request and the tokens released so far.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    legal: bytes | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature must be a finite number above 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie above 0 and at most 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None to keep every token, got {self.top_k}")

    @property
    def restricts(self) -> bool:
        """Whether a token may be dropped for another reason than its smallness."""
        return self.top_p < 1.0 or self.top_k is not None or self.legal is not None

    def illegal(self, vocabulary: int, device: torch.device) -> Tensor | None:
        """Returns the tokens that may not be released, bool [vocabulary]; None if there are none."""
        if self.legal is None:
            return None
        bits = np.unpackbits(np.frombuffer(self.legal, np.uint8), count=vocabulary, bitorder="little")
        return on_device(bits == 0, device)


def shape(
    public: Tensor,
    parts: Tensor,
    models: Sequence[Sequence[int]],
    options: Sequence[SamplingOptions] | SamplingOptions = SamplingOptions(),
    *,
    overwrite_parts: bool = False,
) -> Answers:
    """Shapes log-probabilities into the answers that a protocol processes.

    It keeps the legal tokens and applies the temperature; then it keeps the public model's top_k and top_p tokens (with
    all ties) that are above the support floor, and restricts the parts to the kept tokens. A part's row with NaN or
    +inf, or without mass on the kept tokens, is replaced by the public model's row: an error must not depend on a
    part's output.

    Args:
        public: [S, V], natural log-probabilities of the public model, one row for each sequence.
        parts: [R, V], natural log-probabilities of the drawn models; the rows of a sequence are contiguous, in the
            order of ``models``.
        models: the indices of each sequence's drawn models.
        options: one for each sequence, or one for all.
        overwrite_parts: reuse the memory of ``parts``, a float32 tensor, for the ratios.

    Raises:
        ValueError: shapes do not match, or a public row contains NaN or +inf, or has no mass.
    """
    sequences, vocabulary = public.shape
    by_sequence = (options,) * sequences if isinstance(options, SamplingOptions) else tuple(options)
    if len(by_sequence) != sequences:
        raise ValueError(f"options has {len(by_sequence)} entries, public has {sequences} rows")
    if len(parts) and parts.shape[1] != vocabulary:
        raise ValueError(f"parts has {parts.shape[1]} columns, public has {vocabulary}")
    answers = Answers(
        public=shape_public(public, by_sequence),
        ratios=parts if overwrite_parts else torch.empty_like(parts, dtype=torch.float32),
        models=tuple(map(tuple, models)),
    )
    at_once = rows_at_once(answers.ratios)
    for s, (first, last) in enumerate(answers.spans()):
        p0, temperature = answers.public[s : s + 1], temperatures(by_sequence[s : s + 1], public.device)
        for start in range(first, last, at_once):
            block = slice(start, min(start + at_once, last))
            shape_parts(parts[None, block], p0, temperature, answers.ratios[None, block])
    return answers


def shape_public(log_p: Tensor, options: Sequence[SamplingOptions]) -> Tensor:
    """Returns p0 of S sequences from log-probabilities: float32 [S, V], each row with its own options.

    Raises:
        ValueError: a row contains NaN or +inf, or has no mass.
    """
    public, usable = begin_public(log_p, options)
    check_usable(usable)
    return public


def begin_public(log_p: Tensor, options: Sequence[SamplingOptions]) -> tuple[Tensor, Tensor]:
    """Returns what `shape_public` does, and bool [S], whether each row is usable, without waiting for the device.

    Call `check_usable` before anything is made of p0. A row that is not usable is NaN.
    """
    scales = on_device(np.array([_BITS / option.temperature for option in options], np.float32), log_p.device)
    restricted = {s: option for s, option in enumerate(options) if option.restricts}
    public = torch.empty(log_p.shape, dtype=torch.float32, device=log_p.device)
    usable = torch.empty(len(log_p), dtype=torch.bool, device=log_p.device)
    at_once = rows_at_once(public)
    for start in range(0, len(public), at_once):
        block = slice(start, start + at_once)
        own = {s - start: option for s, option in restricted.items() if start <= s < start + at_once}
        _shape_public(log_p[block], scales[block], own, public[block], usable[block])
    return public, usable


def check_usable(usable: Tensor) -> None:
    """Raises ValueError where a row of `begin_public` is not usable."""
    if not bool(usable.all()):
        raise ValueError("a row of the public model's log-probabilities holds NaN or +inf, or has no mass")


def shape_parts(log_p: Tensor, public: Tensor, temperatures: Tensor, out: Tensor) -> Tensor:
    """Writes the ratios of parts: u proportional to p_i^(1/T) / p0, with mean 1 under p0, and 0 where p0 is 0.

    Args:
        temperatures: float32 [s]. For the others see `rows.shape_parts`.
    """
    return rows.shape_parts(log_p, public, bits_per_nat(temperatures), out)


def temperatures(options: Sequence[SamplingOptions], device: torch.device) -> Tensor:
    """Returns the temperature of each sequence, float32 [S]."""
    return on_device(np.array([option.temperature for option in options], np.float32), device)


def bits_per_nat(temperatures: Tensor) -> Tensor:
    """Returns what turns log-probabilities into bits of p^(1/T), float32 [S]."""
    return _BITS / temperatures


def _shape_public(
    log_p: Tensor, scales: Tensor, restricted: Mapping[int, SamplingOptions], out: Tensor, usable: Tensor
) -> None:
    """Writes p0 [B, V], and which rows are usable, [B]."""
    logs = scratch("logs", out)
    torch.mul(log_p, scales[:, None], out=logs)
    for s, option in restricted.items():
        illegal = option.illegal(logs.shape[1], logs.device)
        if illegal is not None:
            logs[s].masked_fill_(illegal, -math.inf)
    largest = logs.amax(dim=1, keepdim=True)
    usable.copy_(largest[:, 0].isfinite())
    logs -= largest
    for s, option in restricted.items():
        row = logs[s]
        if option.top_k is not None and option.top_k < len(row):
            _drop_below(row, row.topk(option.top_k).values[-1], -math.inf)
        if option.top_p < 1.0:
            _drop_below(row, _nucleus_floor(row, option.top_p), -math.inf)
    powers_of_two(logs, out)
    out *= 1 / totals(out)
    _drop_below(out, SUPPORT_FLOOR, 0.0)
    out *= 1 / totals(out)


def _drop_below(values: Tensor, least: Tensor | float, dropped: float) -> None:
    """Replaces smaller values. Does not wait for a number that is on a GPU."""
    if isinstance(least, torch.Tensor) and least.is_cuda:
        values.masked_fill_(values < least, dropped)
        return
    below = np.nextafter(np.float32(float(least)), np.float32(-np.inf))
    torch.threshold_(values, float(below), dropped)


def _nucleus_floor(logs: Tensor, mass: float) -> Tensor:
    """Returns the smallest log-probability in the nucleus: the smallest set of top tokens that holds ``mass``."""
    wanted = mass * totals(powers_of_two(logs).double())[0]
    ranked = _descending(logs)
    inside = (powers_of_two(ranked.double()).cumsum(0) < wanted).sum()
    return ranked.index_select(0, inside.clamp_(max=len(logs) - 1)[None])[0]


def _descending(row: Tensor) -> Tensor:
    """Sorts numbers. On a CPU, NumPy's sort takes a hundredth of the time of PyTorch's."""
    if row.device.type != "cpu":
        return row.sort(descending=True).values
    return torch.from_numpy(np.sort(row.neg().numpy())).neg_()
