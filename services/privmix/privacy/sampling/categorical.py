"""Samples exactly, with integer weights and integer arithmetic: the output distribution is known to the last bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from privmix.foundation.lazily import torch
from privmix.privacy.sampling.randomness import uniform_below

if TYPE_CHECKING:
    from torch import Tensor

# The largest total: two of them still add without overflow in int64.
TOTAL = 2**62
_CHUNK_BYTES = 2**22


def quantise(weights: Tensor) -> Tensor:
    """Returns integers proportional to non-negative ``weights`` [S, V], with totals below 2**62, int64 [S, V].

    On a GPU nothing waits for the device: there a row that would be an error becomes 0, which `draw` refuses.

    Raises:
        ValueError: a weight is negative or not finite, or a row has no mass.
    """
    exact = weights.double()
    totals = exact.sum(dim=1, keepdim=True)
    usable = totals.isfinite() & (totals > 0) & (exact >= 0).all(dim=1, keepdim=True)
    if not exact.is_cuda:
        if not bool(usable.all()):
            raise ValueError("weights must be finite and non-negative, with a positive total in each row")
        return (exact * (TOTAL / 2 / totals)).round_().long()
    return torch.where(usable, exact * (TOTAL / 2 / totals), 0.0).round_().long()


def sample(weights: Tensor) -> list[int]:
    """Samples one token for each row of int64 ``weights`` [S, V], with probability exactly weight / total.

    Raises:
        ValueError: the weights are not int64, or a row's total is not positive.
    """
    if weights.dtype != torch.int64:
        raise ValueError(f"weights must be int64 (see quantise), got {weights.dtype}")
    rows = len(weights) if weights.is_cuda else max(1, _CHUNK_BYTES // (8 * weights.shape[1]))
    return [token for first in range(0, len(weights), rows) for token in _sample_rows(weights[first : first + rows])]


def accumulated(weights: Tensor) -> Tensor:
    """Returns int64 [S, V], the sums of each row's ``weights`` up to each token; the last one is the row's total."""
    return weights.cumsum(dim=1)


def draw(totals: Iterable[int]) -> list[int]:
    """Draws a point below each total. This is all that is random in a sample: `tokens_at` follows from it.

    Raises:
        ValueError: a total is not positive.
    """
    return [_point(total) for total in totals]


def tokens_at(points: Tensor, cumulative: Tensor) -> Tensor:
    """Returns the tokens in which points lie, int64 [S], on their device.

    Args:
        points: int64 [S], each from 0 to below its row's total.
        cumulative: `accumulated`, int64 [S, V].
    """
    return torch.searchsorted(cumulative, points[:, None], right=True)[:, 0]


def _sample_rows(weights: Tensor) -> list[int]:
    cumulative = accumulated(weights)
    points = draw(cumulative[:, -1].tolist())
    tokens: list[int] = tokens_at(torch.tensor(points, dtype=torch.int64, device=weights.device), cumulative).tolist()
    return tokens


def _point(total: int) -> int:
    if total <= 0:
        raise ValueError("a row of weights has no mass")
    return uniform_below(total)
