"""From a multiset of events to numbers: Rényi divergences, epsilon at a delta, privacy loss distributions.

Every conversion to (epsilon, delta) is dp-accounting's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import TypeVar

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import compute_epsilon
from numpy.typing import NDArray

from services.privacy.events import PLD_INTERVAL, Divergences, Event, Orders

SomeEvent = TypeVar("SomeEvent", bound=Event)
Spent = Mapping[SomeEvent, int]

# The orders at which Rényi divergences are tracked: order - 1 is geometric, 16 to the octave, from 1/16 to 256.
ORDERS: NDArray[np.float64] = 1 + 2.0 ** (np.arange(-64, 129) / 16)
ORDERS.setflags(write=False)


@dataclass(frozen=True)
class Epsilon:
    """An epsilon with the Rényi order that it was converted from."""

    epsilon: float
    order: float


def paid(event: Event, count: int) -> int:
    """How many times so many tokens pay what the event costs."""
    return min(count, 1) if event.once else count


def rdp(spent: Spent[SomeEvent], orders: Orders = ORDERS) -> Divergences:
    """Total Rényi divergence at each order, under the adjacency of the events."""
    total = np.zeros(np.size(orders))
    for event, count in spent.items():
        total += _times(paid(event, count), event.rdp(orders))
    return total


def pld(spent: Spent[SomeEvent], interval: float = PLD_INTERVAL) -> PrivacyLossDistribution | None:
    """Privacy loss distribution of all that was spent; None where nothing was, or an event has no dominating pair."""
    total: PrivacyLossDistribution | None = None
    for event, count in spent.items():
        if count == 0:
            continue
        each = event.pld(interval)
        if each is None:
            return None
        composed = each.self_compose(paid(event, count))
        total = composed if total is None else total.compose(composed)
    return total


def epsilon(divergences: Divergences, delta: float, orders: Orders = ORDERS) -> Epsilon:
    """The smallest epsilon that the divergences give at ``delta``, over the orders.

    Where events may depend on earlier answers, pass one order fixed in advance (privacy filter).
    """
    _check_delta(delta)
    if not np.any(divergences):
        return Epsilon(0.0, float(np.atleast_1d(orders)[-1]))
    smallest, order = compute_epsilon(np.atleast_1d(orders), np.atleast_1d(divergences), delta)
    return Epsilon(float(smallest), float(order))


def pld_epsilon(spent: Spent[SomeEvent], delta: float, interval: float = PLD_INTERVAL) -> float | None:
    """Epsilon at ``delta`` of the composed privacy loss distribution; None where an event has none."""
    _check_delta(delta)
    if not any(spent.values()):
        return 0.0
    composed = pld(spent, interval)
    return None if composed is None else float(composed.get_epsilon_for_delta(delta))


def round_up(value: float, digits: int = 3) -> float:
    """The value rounded up to ``digits`` decimals: a shown epsilon never understates."""
    if not math.isfinite(value):
        return value
    return float(Decimal(value).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING))


def shown(value: float, digits: int = 3) -> str:
    """An epsilon as text, rounded up."""
    return "unbounded" if not math.isfinite(value) else f"{round_up(value, digits):.{digits}f}"


def _times(count: int, divergences: Divergences) -> Divergences:
    if count < 0:
        raise ValueError(f"an event's count must not be negative, got {count}")
    return count * divergences if count else np.zeros_like(divergences)


def _check_delta(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie between 0 and 1, got {delta}")
