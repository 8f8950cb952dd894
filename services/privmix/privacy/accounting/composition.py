"""Composes a multiset of events to Rényi divergences, privacy loss distributions, and epsilon at a delta.

dp-accounting does every conversion to (epsilon, delta).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from privmix.privacy.events import PLD_INTERVAL, Divergences, Event, Orders

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

SomeEvent = TypeVar("SomeEvent", bound=Event)
Spent = Mapping[SomeEvent, int]
Payments = tuple[tuple[Event, int], ...]
"""Events and how many times each is paid: what functions keep their results by."""

# The tracked Rényi orders: order - 1 is a geometric sequence with 16 values in an octave, from 1/16 to 2^22. An epsilon
# needs orders of about 2 log(1 / delta) / epsilon, and many times that for few tokens: the last are for 0.001 at 1e-12.
ORDERS: NDArray[np.float64] = 1 + 2.0 ** (np.arange(-64, 353) / 16)
ORDERS.setflags(write=False)

# A grid of losses has at least this many intervals up to epsilon, or up to the least epsilon.
_GRID, _LEAST_EPSILON = 1000, 1e-5
# The size of the largest such grid: its arrays have some megabytes.
_MAX_INTERVALS = 2**20


@dataclass(frozen=True)
class Epsilon:
    """Holds an epsilon and the Rényi order from which it was converted."""

    epsilon: float
    order: float


def paid(event: Event, count: int) -> int:
    """Returns how many times ``count`` tokens pay the cost of the event."""
    return min(count, 1) if event.once else count


def payments(spent: Spent[SomeEvent]) -> Payments:
    """Returns each event and how many times it is paid."""
    return tuple((event, paid(event, count)) for event, count in spent.items())


def rdp(spent: Spent[SomeEvent], orders: Orders = ORDERS) -> Divergences:
    """Returns the total Rényi divergence at each order, under the events' adjacency."""
    total = np.zeros(np.size(orders))
    for event, count in spent.items():
        total += _times(paid(event, count), event.rdp(orders))
    return total


def pld(spent: Spent[SomeEvent], interval: float = PLD_INTERVAL) -> PrivacyLossDistribution | None:
    """Returns the composed privacy loss distribution; None if nothing was spent or an event has none."""
    total: PrivacyLossDistribution | None = None
    for event, count in spent.items():
        if count == 0:
            continue
        single = event.pld(interval)
        if single is None:
            return None
        times = paid(event, count)
        composed = single if times == 1 else single.self_compose(times)  # which would cut tails, even once
        total = composed if total is None else total.compose(composed)
    return total


def epsilon(divergences: Divergences, delta: float, orders: Orders = ORDERS) -> Epsilon:
    """Returns the smallest epsilon at ``delta`` over the orders.

    If events may depend on earlier answers, pass a single order that was fixed in advance (privacy filter).
    """
    from dp_accounting.rdp import compute_epsilon  # slow to import

    _check_delta(delta)
    if not np.any(divergences):
        return Epsilon(0.0, float(np.atleast_1d(orders)[-1]))
    smallest, order = compute_epsilon(np.atleast_1d(orders), np.atleast_1d(divergences), delta)
    return Epsilon(float(smallest), float(order))


def pld_epsilon(spent: Spent[SomeEvent], delta: float, interval: float = PLD_INTERVAL) -> float | None:
    """Returns epsilon at ``delta`` from the composed privacy loss distribution; None if an event has none."""
    _check_delta(delta)
    if not any(spent.values()):
        return 0.0
    return _pld_epsilon(payments(spent), delta, interval)


@lru_cache(maxsize=1024)
def _pld_epsilon(spent: Payments, delta: float, interval: float) -> float | None:
    """Returns what `pld_epsilon` does. It is kept: a composition takes up to seconds."""
    composed = pld(dict(spent), interval)
    if composed is None:
        return None
    rounded = float(composed.get_epsilon_for_delta(delta))
    if rounded <= 0:
        return rounded
    # Losses are rounded up to the grid: too much for an epsilon of a few intervals.
    finer = max(max(rounded, _LEAST_EPSILON) / _GRID, interval * _span(composed) / _MAX_INTERVALS)
    if finer >= interval:
        return rounded
    composed = pld(dict(spent), finer)
    assert composed is not None
    return min(rounded, float(composed.get_epsilon_for_delta(delta)))


def _span(composed: PrivacyLossDistribution) -> int:
    """Returns the number of intervals from the smallest to the largest loss."""
    return max(len(pmf.to_dense_pmf()._probs) for pmf in (composed._pmf_remove, composed._pmf_add))


def round_up(value: float, digits: int = 3) -> float:
    """Rounds up to ``digits`` decimals, so that a displayed epsilon is never too small."""
    if not math.isfinite(value):
        return value
    # The shortest decimal of a float, not its binary value: a number that was rounded before does not grow again.
    return float(Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING))


def shown(value: float, digits: int = 3) -> str:
    """Formats a computed epsilon, rounded up."""
    return "unbounded" if not math.isfinite(value) else f"{round_up(value, digits):.{digits}f}"


def stated(epsilon: float | None) -> str:
    """Formats the epsilon of a budget without rounding, such as 8 or 0.1; None is unbounded."""
    return "unbounded" if epsilon is None else repr(float(epsilon)).removesuffix(".0")


def _times(count: int, divergences: Divergences) -> Divergences:
    if count < 0:
        raise ValueError(f"an event's count must not be negative, got {count}")
    return count * divergences if count else np.zeros_like(divergences)


def _check_delta(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie between 0 and 1, got {delta}")
