"""Samples exactly, with integer weights and integer arithmetic: the output distribution is known to the last bit."""

import torch
from torch import Tensor

from services.privacy.sampling.randomness import uniform_below

# The largest total: two of them still add without overflow in int64.
TOTAL = 2**62
_CHUNK_BYTES = 2**22


def quantise(weights: Tensor) -> Tensor:
    """Returns integers proportional to non-negative ``weights`` [S, V], with totals below 2**62, int64 [S, V].

    Raises:
        ValueError: a weight is negative or not finite, or a row has no mass.
    """
    exact = weights.double()
    totals = exact.sum(dim=1, keepdim=True)
    if not bool(torch.isfinite(totals).all() and (totals > 0).all() and (exact >= 0).all()):
        raise ValueError("weights must be finite and non-negative, with a positive total in each row")
    return (exact * (TOTAL / 2 / totals)).round_().long()


def sample(weights: Tensor) -> list[int]:
    """Samples one token for each row of int64 ``weights`` [S, V], with probability exactly weight / total.

    Raises:
        ValueError: the weights are not int64, or a row's total is not positive.
    """
    if weights.dtype != torch.int64:
        raise ValueError(f"weights must be int64 (see quantise), got {weights.dtype}")
    rows = max(1, _CHUNK_BYTES // (8 * weights.shape[1]))
    return [token for first in range(0, len(weights), rows) for token in _sample_rows(weights[first : first + rows])]


def _sample_rows(weights: Tensor) -> list[int]:
    cumulative = weights.cumsum(dim=1)
    totals: list[int] = cumulative[:, -1].tolist()
    if min(totals, default=1) <= 0:
        raise ValueError("a row of weights has no mass")
    points = torch.tensor([[uniform_below(total)] for total in totals], device=weights.device)
    tokens: list[int] = torch.searchsorted(cumulative, points, right=True).flatten().tolist()
    return tokens
