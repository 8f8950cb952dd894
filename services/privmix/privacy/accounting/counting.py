"""Counts tokens of one event by the exact composition of its dominating pair (README, Theorem 5).

The Rényi filter bounds a sequence of events that may depend on earlier answers. Where all tokens have one event, and
their number is fixed in advance, the pair that dominates each token composes exactly, for an adversary who chooses
every input after seeing the earlier tokens. Tokens of other events are bought in blocks: a block costs as many tokens
of the first event as dominate it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from privmix.privacy.accounting import composition
from privmix.privacy.arrays import Reals
from privmix.privacy.events import PLD_INTERVAL, Event

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

# The fraction of delta that all blocks together may add: a block is dominated up to this much.
_MARGIN = 2.0**-8
# The rounding of a composition, for each token: of the Fourier transforms, and of the tails that they cut.
_ROUNDING = 2.0**-50

_MAX_COUNT = 2**22
MAX_EPSILON = 64.0
"""Beyond it, exact composition gains nothing that anyone would promise, and its grid fills gigabytes."""


def largest_count(event: Event, epsilon: float, delta: float, before: Mapping[Event, int], least: int) -> int | None:
    """Returns how many tokens of `event` stay within (epsilon, delta) by exact composition.

    Returns None if `least` tokens do not, and for an epsilon that is too large for a grid of losses.

    Args:
        before: what the budget pays besides, such as a private base. It is fixed in advance too.
        least: a number to start from.
    """

    if not is_countable(event, epsilon):
        return None

    def excess_of(count: int) -> float:
        return excess(event, count, epsilon, delta, before)

    fits, too_many = least, min(_MAX_COUNT, least + max(1, least // 4))
    below = excess_of(fits)
    if below > 0:
        return None
    above = excess_of(too_many)
    while above <= 0 and too_many < _MAX_COUNT:
        fits, below, too_many = too_many, above, min(_MAX_COUNT, 2 * too_many)
        above = excess_of(too_many)
    while too_many - fits > 1:
        position = below / (below - above) if math.isfinite(above) else 0.5
        middle = min(too_many - 1, max(fits + 1, fits + int(position * (too_many - fits))))
        if (between := excess_of(middle)) <= 0:
            fits, below = middle, between
        else:
            too_many, above = middle, between
    return fits


def is_countable(event: Event, epsilon: float) -> bool:
    """Returns whether a ledger may count tokens of this event instead of adding up Rényi divergences.

    Every token costs the same, whatever the private text, and its pair is known; the grid of losses has a bounded size.
    """
    return epsilon <= MAX_EPSILON and not event.measured and not event.once and event.pld() is not None


def excess(
    event: Event,
    count: int,
    epsilon: float,
    delta: float,
    before: Mapping[Event, int],
    interval: float = PLD_INTERVAL,
) -> float:
    """Returns the log of the divergence at `epsilon` over what is allowed: these tokens fit if it is at most 0.

    It is nearly linear in the count; inf if the divergence is unknown or nothing of delta is left.
    """
    left = room(delta, count)
    divergence = _divergence(composition.payments({**before, event: count}), epsilon, interval) if left > 0 else None
    return math.inf if divergence is None else math.log(max(divergence, _ROUNDING) / left)


@lru_cache(maxsize=1024)
def _divergence(spent: composition.Payments, epsilon: float, interval: float) -> float | None:
    """Returns the divergence at epsilon; None if it is unknown. It is kept: a composition takes up to seconds."""
    composed = composition.pld(dict(spent), interval)
    return None if composed is None else float(composed.get_delta_for_epsilon(epsilon))


def epsilon(event: Event, count: int, delta: float, before: Mapping[Event, int]) -> float:
    """Returns the epsilon of tokens that `largest_count` counts; inf if it is unknown or nothing of delta is left."""
    composed, left = composition.pld({**before, event: count}), room(delta, count)
    if composed is None or left <= 0:
        return math.inf
    deltas = _hockey_sticks(composed, largest=True)
    if not deltas[-1] <= left:
        return math.inf
    index = int(np.argmax(deltas <= left))
    if index == 0:
        return 0.0
    # Between two points of the grid, the divergence is linear in e^epsilon.
    high, low = deltas[index - 1], deltas[index]
    return (index - 1) * PLD_INTERVAL + math.log1p((high - left) / (high - low) * math.expm1(PLD_INTERVAL))


@lru_cache(maxsize=256)
def price(event: Event, count: int, unit: Event, most: int, delta: float) -> int | None:
    """Returns how many tokens of `unit` dominate a block of `count` tokens of `event`; None if `most` do not.

    A block of price k may exceed the hockey-stick divergences of k tokens by the fraction k / `most` of the margin. All
    blocks together cost at most `most` tokens, so they add at most the whole margin.

    Args:
        most: the number of tokens of `unit` in the whole budget.
    """
    block, single = event.pld(), unit.pld()
    if block is None or single is None:
        return None
    spent = _hockey_sticks(_times(block, count), largest=True)

    def dominates(tokens: int) -> bool:
        room = delta * _MARGIN * tokens / most - (tokens + count) * _ROUNDING
        allowed = _hockey_sticks(_times(single, tokens), largest=False)
        size = max(len(spent), len(allowed))
        return bool((_padded(spent, size) <= _padded(allowed, size) + room).all())

    # Divergences of order 2 tell where to begin.
    ratio = float(event.rdp([2.0])[0] / unit.rdp([2.0])[0])
    first = min(most, max(1, math.ceil(count * ratio))) if math.isfinite(ratio) else most
    if dominates(first):
        return first
    last = _last(lambda tokens: not dominates(tokens), first, most)
    return None if last == most else last + 1


def _hockey_sticks(composed: PrivacyLossDistribution, *, largest: bool) -> Reals:
    """Returns the divergences at all multiples of the interval, from 0 on: the larger or smaller of both directions."""
    directions = [_hockey_stick(pmf) for pmf in (composed._pmf_remove, composed._pmf_add)]
    size = max(map(len, directions))
    padded = [_padded(direction, size) for direction in directions]
    return np.asarray(np.max(padded, axis=0) if largest else np.min(padded, axis=0))


def _hockey_stick(pmf: PLDPmf) -> Reals:
    """Returns ``sum_j max(0, 1 - e^(epsilon - loss_j)) p_j`` at the multiples of the interval, to the largest loss."""
    dense = pmf.to_dense_pmf()
    first = dense._lower_loss
    masses = np.concatenate([np.zeros(max(0, first)), dense._probs[max(0, -first) :]])
    losses = np.arange(len(masses)) * PLD_INTERVAL
    above = np.cumsum(masses[::-1])[::-1]
    below = np.cumsum((masses * np.exp(-losses))[::-1])[::-1]
    return np.asarray(dense._infinity_mass + np.maximum(0.0, above - np.exp(losses) * below))


def _padded(divergences: Reals, size: int) -> Reals:
    """Extends divergences: beyond the largest loss, they stay what they are at it."""
    last = divergences[-1] if len(divergences) else 0.0
    return np.pad(divergences, (0, size - len(divergences)), constant_values=last)


def _last(holds: Callable[[int], bool], first: int, most: int) -> int:
    """Returns the last number up to `most` for which a condition holds that holds at `first` and ends once."""
    step = 1
    while first + step <= most and holds(first + step):
        first, step = first + step, 2 * step
    above = min(first + step, most + 1)
    while above - first > 1:
        middle = (first + above) // 2
        first, above = (middle, above) if holds(middle) else (first, middle)
    return first


def room(delta: float, count: int) -> float:
    """Returns what blocks and the rounding of a composition leave of delta for this number of tokens."""
    return delta * (1 - _MARGIN) - count * _ROUNDING


def _times(single: PrivacyLossDistribution, count: int) -> PrivacyLossDistribution:
    return single if count == 1 else single.self_compose(count)
