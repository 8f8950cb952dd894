"""Computes the partials of an additive protocol in blocks of rows that fit the caches.

A block's shape follows from the shape of the rows alone: it depends neither on a draw nor on what a row says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from privmix.foundation.lazily import torch
from privmix.privacy.mollifiers.blocks import rows_at_once, scratch
from privmix.privacy.mollifiers.shaping import SamplingOptions, bits_per_nat, shape_parts, temperatures
from privmix.privacy.protocol import Answers, Partial, PartLogits, PartRows, Protocol, Release

if TYPE_CHECKING:
    from torch import Tensor


def distribution(protocol: Protocol, answers: Answers, count: int) -> Release:
    """Computes the release from shaped rows, of which each sequence has ``count``."""
    sequences, vocabulary = answers.public.shape
    ratios = answers.ratios.view(sequences, count, vocabulary)
    drawn = torch.ones((sequences, count), dtype=torch.bool, device=ratios.device)
    partial = _in_blocks(protocol, answers.public, drawn, answers.allowances, lambda s, i: ratios[s, i])
    return protocol.combine(answers.public, partial.sums, partial.charges)


def reduce(
    protocol: Protocol,
    public: Tensor,
    log_p: Tensor,
    options: Sequence[SamplingOptions],
    drawn: Tensor,
    allowances: Tensor | None = None,
) -> Partial:
    """Shapes the rows of some of the parts and computes their partial, on the device of the rows.

    Args:
        options: one for each sequence.
        For the others see `reduce_at`.
    """
    return reduce_at(protocol, public, log_p, temperatures(options, public.device), drawn, allowances)


def reduce_at(
    protocol: Protocol,
    public: Tensor,
    log_p: Tensor,
    temperatures: Tensor,
    drawn: Tensor,
    allowances: Tensor | None = None,
) -> Partial:
    """Does what `reduce` does, from tensors of the device alone, so that a CUDA graph can capture it.

    Args:
        public: float32 [S, V], p0 (`shaping.shape_public`): the one that the token is sampled from.
        log_p: [S, n, V], natural log-probabilities; a row may lack a constant, as logits do. It need not be contiguous.
        temperatures: float32 [S].
        drawn: see `PartRows`.
        allowances: see `PartRows`.
    """
    fused = protocol.fused(PartLogits(public, log_p, bits_per_nat(temperatures), drawn, allowances))
    if fused is not None:
        return fused

    def shaped(s: slice, i: slice) -> Tensor:
        block = log_p[s, i]
        return shape_parts(block, public[s], temperatures[s], scratch("shaped", block, torch.float32))

    return _in_blocks(protocol, public, drawn, allowances, shaped)


def _in_blocks(
    protocol: Protocol,
    public: Tensor,
    drawn: Tensor,
    allowances: Tensor | None,
    ratios: Callable[[slice, slice], Tensor],
) -> Partial:
    """Adds up the partials of blocks of sequences and parts.

    Args:
        ratios: returns those of a block.
    """
    sequences, parts = drawn.shape
    at_once = rows_at_once(public[:1].expand(sequences * parts, -1))
    height, width = max(1, at_once // parts), min(parts, at_once)

    def partial(s: slice, i: slice) -> Partial:
        granted = None if allowances is None else allowances[s, i]
        return protocol.partial(PartRows(public[s], ratios(s, i), drawn[s, i], granted))

    bands = []
    for s in range(0, sequences, height):
        first, *others = (partial(slice(s, s + height), slice(i, i + width)) for i in range(0, parts, width))
        for other in others:
            first.sums.add_(other.sums)
        bands.append(Partial(first.sums, _joined([first, *others], dim=1)))
    return Partial(torch.cat([band.sums for band in bands]), _joined(bands, dim=0))


def _joined(partials: Sequence[Partial], dim: int) -> Tensor | None:
    charges = [partial.charges for partial in partials if partial.charges is not None]
    return torch.cat(charges, dim=dim) if charges else None
