"""Measures how far a part's two models agree: lambda_i of SubMix (Ginart et al. 2022), for many parts at once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from privmix.foundation.lazily import torch
from privmix.privacy.mollifiers.blocks import Column, column, row_sums, scratch, to_column

if TYPE_CHECKING:
    from torch import Tensor

# The relative distance by which the solution stays below the bound, in addition to the float32 error. The terms are
# squares of changes, and float32 knows the mean change, the root of the divergence, to 1e-7.
_TOLERANCE = 1e-5
_ROUNDING = 1e-6
_SMALLEST_BOUND = 1e-10
_SECANT_STEPS = 12
_STEPS = 64
_TINY = 1e-30
_HUGE = 1e30


def check_bound(beta: float) -> None:
    """Raises ValueError, which names ``beta``, if it is not a bound that float32 can resolve."""
    if not _SMALLEST_BOUND <= beta < math.inf:
        raise ValueError(f"beta must be a finite number of at least {_SMALLEST_BOUND:g}, got {beta}")


def largest_weights(pairs: Tensor, public: Tensor, order: float, beta: float) -> Column:
    """Returns the largest lambda in [0, 1] with D_a( lambda h + (1-lambda) p0 || lambda h' + (1-lambda) p0 ) <= beta.

    The divergence increases with lambda from 0. The secant method solves for its logarithm as a function of
    log(lambda), which is nearly linear for small lambda. The bracket begins where even the largest likelihood ratio
    meets the bound.

    Args:
        pairs: float32 [C, 2, V], likelihood ratios u = h / p0 and u' = h' / p0 on the kept set.
        public: float32 [V].
        order: a > 1.
        beta: the bound, in nats.

    Returns:
        float64 [C].
    """
    own, other = pairs[:, 0], pairs[:, 1]
    apart = torch.sub(own, other, out=scratch("inside", own))
    tolerance = _TOLERANCE + _ROUNDING / math.sqrt(beta)
    target = beta / (1 + tolerance)
    below = math.expm1(target) / (math.exp(target) + to_column(own.amax(dim=1)))
    above = np.full(len(pairs), np.nextafter(1.0, 2.0))
    weight, slope = _first_guess(apart, public, order, target), np.full(len(pairs), 2.0)
    last: tuple[Column, Column] | None = None
    for count in range(_STEPS):
        divergence = _divergence(apart, other, weight, public, order)
        within = divergence <= beta
        solved = within & ((weight == 1) | (divergence * (1 + tolerance) ** 2 >= beta))
        if solved.all():
            break
        below, above = np.where(within, weight, below), np.where(within, above, weight)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            at = np.log(weight), np.log(divergence / target)
            if last is not None:
                steep = (at[1] - last[1]) / (at[0] - last[0])
                slope = np.where(np.isfinite(steep) & (steep > 0), steep, slope)
            secant = np.minimum(1.0, weight * np.exp(-at[1] / slope))
        last = at
        usable = (secant > below) & (secant < above) & (count < _SECANT_STEPS or count % 2 == 0)
        weight = np.where(solved, weight, np.where(usable, secant, np.minimum(1.0, np.sqrt(below * above))))
    return np.where(solved, weight, below)


def _first_guess(apart: Tensor, public: Tensor, order: float, bound: float) -> Column:
    """Solves the leading term of the divergence, a lambda^2 E[(u - u')^2] / 2, for lambda; 1 if lambda is near 1."""
    squares = torch.mul(apart, apart, out=scratch("inner", apart)).mul_(public)
    guess = np.sqrt(2 * bound / (order * np.maximum(row_sums(squares), _TINY)))
    return np.where(guess > 0.7, 1.0, guess)


def _divergence(apart: Tensor, other: Tensor, weight: Column, public: Tensor, order: float) -> Column:
    """Returns D_a for each pair, from the sum of p0 m' ((1 + d)^a - 1 - a d); m' = 1 + lambda (u' - 1), 1 + d = m / m'.

    No term is negative, so small terms are not lost in rounding. The result is infinite if a power overflows.
    """
    mixed = torch.mul(other, column(weight, other), out=scratch("power", other))
    mixed.add_(column(1 - weight, other)).clamp_min_(_TINY)  # at lambda = 1 both may be 0, and d is 0
    change = torch.mul(apart, column(weight, other), out=scratch("inner", other)).div_(mixed).clamp_max_(_HUGE)
    terms = torch.log1p(change, out=scratch("terms", other)).mul_(order).expm1_().sub_(change, alpha=order)
    moment = row_sums(terms.mul_(mixed).mul_(public))
    return np.nan_to_num(np.log1p(moment) / (order - 1), nan=np.inf, posinf=np.inf)
