"""Computes data-dependent losses: the divergence between a mean of rows and the mean without each row.

The computation is in float64, in blocks of rows. Most losses are tiny, so it sums the distance of a moment from 1: with
t = q / p, ``sum p t^k - 1 = sum p (t^k - 1) - k sum p (t - 1)``. The last sum is 0 except for the rounding of t, which
it cancels to first order. If the other rows give a token less than about 2**-50 of a row's probability, their mean is
known only by its magnitude or becomes 0: the loss is about 30 nats, or infinite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from privmix.foundation.lazily import torch
from privmix.privacy.mollifiers.blocks import Column, column, rows_at_once, scratch, to_column

if TYPE_CHECKING:
    from torch import Tensor


def losses(rows: Tensor, public: Tensor, order: float) -> Column:
    """Returns D_a<->( p || p_{-i} ) for each of n rows with mean p, where p_{-i} = (n p - r_i) / (n - 1).

    Args:
        rows: float32 [n, V], n >= 1, distributions. Each is divided by its sum.
        public: [V], the distribution without the only part if n = 1. It is divided by its sum.
        order: a > 1.

    Returns:
        float64 [n]; infinite if only one of the two distributions gives a token mass.
    """
    weights = 1 / to_column(rows.sum(dim=1, dtype=torch.float64))
    if len(rows) == 1:
        p0 = public.double()
        return symmetrised(_weighted(rows, weights), p0 / p0.sum(), order)
    total = torch.zeros_like(public, dtype=torch.float64)
    blocks = [slice(start, start + rows_at_once(rows)) for start in range(0, len(rows), rows_at_once(rows))]
    for block in blocks:
        total += _weighted(rows[block], weights[block]).sum(dim=0)
    mean, divergences = total / len(rows), np.empty(len(rows))
    for block in blocks:
        own = _weighted(rows[block], weights[block])
        divergences[block] = symmetrised(torch.sub(total, own, out=own).div_(len(rows) - 1), mean, order)
    return divergences


def symmetrised(others: Tensor, p: Tensor, order: float) -> Column:
    """Returns D_a<->( p || q ), the larger of both directions, for each row q of ``others``. Overwrites ``others``.

    Args:
        others: float64 [C, V], distributions that have no mass where p has none.
        p: float64 [V].
        order: a > 1.
    """
    ratios = others.div_(p).nan_to_num_(nan=1.0, posinf=np.inf)  # tokens without mass in both count as equal
    logs = torch.log(ratios, out=scratch("logs", ratios))
    change = to_column(ratios.sub_(1) @ p)
    forward, backward = (_log_moment(logs, change, p, power) for power in (order, 1 - order))
    divergence = np.maximum(0.0, np.maximum(forward, backward)) / (order - 1)
    return np.where(np.isnan(divergence), np.inf, divergence)


def _log_moment(logs: Tensor, change: Column, p: Tensor, power: float) -> Column:
    """Returns log sum p t^power for each row, from log t and ``change`` = sum p (t - 1)."""
    terms = torch.mul(logs, power, out=scratch("terms", logs)).expm1_()
    with np.errstate(invalid="ignore"):
        moments = np.log1p(to_column(terms @ p) - power * change)
    overflowed = ~np.isfinite(moments)
    if overflowed.any():
        rows = torch.from_numpy(overflowed).to(logs.device)
        moments[overflowed] = to_column(torch.logsumexp(power * logs[rows] + p.log(), dim=1))
    return moments


def _weighted(rows: Tensor, weights: Column) -> Tensor:
    weighted = scratch("own", rows, torch.float64).copy_(rows)
    return weighted.mul_(column(weights, weighted))
