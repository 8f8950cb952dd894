"""Data-dependent losses: what leaving one part out changes of a mean, for every part from the one sum.

In float64, row by row in blocks. Most losses are tiny, so a moment is summed by how far it is from 1: with t = q / p,
``sum p t^k - 1 = sum p (t^k - 1) - k sum p (t - 1)``, where the last sum is 0 but for the rounding of t, which it
cancels to first order. Where the others give a token less than some 2**-50 of what a part gives it, the difference that
they are is known by its size alone, or taken for 0: a loss of some 30 nats, or an infinite one.
"""

import numpy as np
import torch
from torch import Tensor

from services.privacy.mollifiers.blocks import Column, column, rows_at_once, scratch, to_column


def losses(rows: Tensor, public: Tensor, order: float) -> Column:
    """D_a<->( p || p_{-i} ) for each of the n rows, p their mean and p_{-i} = (n p - r_i) / (n - 1) that of the others.

    Args:
        rows: float32 [n, V], n >= 1, distributions; each is divided by its own sum.
        public: [V], what is released without the only part, where n = 1; also divided by its sum.
        order: a > 1.

    Returns:
        float64 [n]; infinite where one of the two gives a token no mass and the other does.
    """
    shares = 1 / to_column(rows.sum(dim=1, dtype=torch.float64))
    if len(rows) == 1:
        p0 = public.double()
        return symmetrised(_weighted(rows, shares), p0 / p0.sum(), order)
    total = torch.zeros_like(public, dtype=torch.float64)
    blocks = [slice(start, start + rows_at_once(rows)) for start in range(0, len(rows), rows_at_once(rows))]
    for block in blocks:
        total += _weighted(rows[block], shares[block]).sum(dim=0)
    mean, found = total / len(rows), np.empty(len(rows))
    for block in blocks:
        own = _weighted(rows[block], shares[block])
        found[block] = symmetrised(torch.sub(total, own, out=own).div_(len(rows) - 1), mean, order)
    return found


def symmetrised(others: Tensor, p: Tensor, order: float) -> Column:
    """D_a<->( p || q ), the larger of both directions, for each row q of ``others``, which is overwritten.

    Args:
        others: float64 [C, V], distributions without mass where p has none.
        p: float64 [V].
        order: a > 1.
    """
    ratios = others.div_(p).nan_to_num_(nan=1.0, posinf=np.inf)  # tokens that neither gives any mass tell nothing
    logs = torch.log(ratios, out=scratch("logs", ratios))
    change = to_column(ratios.sub_(1) @ p)
    forward, backward = (_log_moment(logs, change, p, power) for power in (order, 1 - order))
    divergence = np.maximum(0.0, np.maximum(forward, backward)) / (order - 1)
    return np.where(np.isnan(divergence), np.inf, divergence)


def _log_moment(logs: Tensor, change: Column, p: Tensor, power: float) -> Column:
    """log sum p t^power per row, from log t and ``change`` = sum p (t - 1)."""
    terms = torch.mul(logs, power, out=scratch("terms", logs)).expm1_()
    with np.errstate(invalid="ignore"):
        moments = np.log1p(to_column(terms @ p) - power * change)
    overflowed = ~np.isfinite(moments)
    if overflowed.any():
        rows = torch.from_numpy(overflowed).to(logs.device)
        moments[overflowed] = to_column(torch.logsumexp(power * logs[rows] + p.log(), dim=1))
    return moments


def _weighted(rows: Tensor, shares: Column) -> Tensor:
    weighted = scratch("own", rows, torch.float64).copy_(rows)
    return weighted.mul_(column(shares, weighted))
