"""Implements the mollifier of PMixED as published (Flemings et al. 2024, Algorithm 1): a Rényi ball at one order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from privmix.foundation.lazily import torch
from privmix.privacy.mollifiers.blocks import Column, column, row_sums, scratch, to_column

if TYPE_CHECKING:
    from torch import Tensor

# The float32 error of a moment's sum, and the relative distance by which the divergence stays below the bound.
_SUM_ERROR = 5e-7
_TOLERANCE = 1e-5
_NEWTON_STEPS = 8
_STEPS = 128
_TINY = 1e-30


def mollify(ratios: Tensor, public: Tensor, order: float, bound: float, out: Tensor | None = None) -> Tensor:
    """Returns lambda p_i + (1 - lambda) p0 with the largest lambda in [0, 1] whose D_a<-> to p0 is within ``bound``.

    The divergence increases with lambda from 0. Newton's method solves for its logarithm as a function of log(lambda),
    which is nearly linear for small lambda. The bracket begins where the likelihood ratio itself meets the bound.

    Args:
        ratios: float32 [C, V], u = p_i / p0 on the kept set.
        public: float32 [V]; or [C, V], one for each row.
        order: a > 1.
        bound: the largest divergence, in nats (beta times a).
        out: float32 [C, V], the tensor for the result.

    Returns:
        float32 [C, V].

    Raises:
        ValueError: the bound is too small for float32 to resolve lambda.
    """
    tolerance = _TOLERANCE + _SUM_ERROR / (bound * (order - 1))
    if tolerance > 0.5:
        raise ValueError(f"a bound of {bound:g} at order {order:g} is below what float32 resolves")
    target = bound * (1 - tolerance)
    mixed = torch.empty_like(ratios) if out is None else out
    # Dropped tokens count as equally likely under both distributions.
    inside = torch.add(ratios, 1 - public.sign(), out=scratch("inside", ratios))
    largest, smallest = to_column(inside.amax(dim=1)), to_column(inside.amin(dim=1))
    above = np.full(len(ratios), np.nextafter(1.0, 2.0))
    weight = _first_guess(inside, public, order, bound)
    with np.errstate(divide="ignore"):
        below = np.minimum(math.expm1(target) / np.maximum(largest - 1, 0), -math.expm1(-target) / (1 - smallest))
    for count in range(_STEPS):
        mean = np.sqrt((1 + weight * (largest - 1)) * np.maximum(1 + weight * (smallest - 1), _TINY))
        torch.mul(inside, column(weight / mean, ratios), out=mixed).add_(column((1 - weight) / mean, ratios))
        divergence, growth = _divergence(mixed, mean, public, order)
        within = divergence <= target
        solved = np.where(within, (weight == 1) | (divergence >= target * (1 - tolerance)), divergence <= bound)
        if solved.all():
            break
        below, above = np.where(within, weight, below), np.where(within, above, weight)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            newton = np.minimum(1.0, weight * (target / divergence) ** (divergence / growth))
        usable = (newton > below) & (newton < above) & (count < _NEWTON_STEPS or count % 2 == 0)
        weight = np.where(solved, weight, np.where(usable, newton, np.sqrt(below * above)))
    return mixed.mul_(column(mean, ratios)).mul_(public)


def _first_guess(ratios: Tensor, public: Tensor, order: float, bound: float) -> Column:
    """Solves the leading term of the divergence, a lambda^2 chi^2 / 2, for lambda; 1 if lambda is near 1."""
    moment = torch.mul(ratios, ratios, out=scratch("inner", ratios)).mul_(public)
    chi_squared = np.maximum(row_sums(moment) - 1, _TINY)
    guess = np.sqrt(2 * bound / (order * chi_squared))
    return np.where(guess > 0.7, 1.0, guess)


def _divergence(mixed: Tensor, mean: Column, public: Tensor, order: float) -> tuple[Column, Column]:
    """Returns D_a<-> and its derivative by log(lambda) for each row, for m = 1 + lambda (u - 1), given as m / mean.

    Dividing by the geometric mean of m's extremes delays overflow of the powers. If they overflow, the divergence is
    infinite.
    """
    power, moment = scratch("power", mixed), scratch("inner", mixed)
    torch.pow(mixed, order - 1, out=power)
    lower = mean ** (order - 1) * row_sums(torch.mul(power, public, out=moment))
    upper = mean**order * row_sums(moment.mul_(mixed))
    upper_inverse = mean ** (1 - order) * row_sums(torch.div(public, power, out=moment))
    lower_inverse = mean**-order * row_sums(moment.div_(mixed))
    with np.errstate(divide="ignore", invalid="ignore"):
        forward, backward = np.log(upper), np.log(upper_inverse)
        growth = np.where(
            forward >= backward, order * (1 - lower / upper), (order - 1) * (lower_inverse / upper_inverse - 1)
        )
    divergence = np.nan_to_num(np.maximum(forward, backward), nan=np.inf, posinf=np.inf)
    return divergence / (order - 1), growth / (order - 1)
