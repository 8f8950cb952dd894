"""Plans a budget: computes the cost of a number of tokens, and the largest parameter that a budget allows."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context, Decimal
from functools import lru_cache

import scipy

from privmix.privacy import accounting
from privmix.privacy.accounting import composition, counting
from privmix.privacy.accounting.composition import Spent
from privmix.privacy.events import PLD_INTERVAL, Accountant, Event, Orders

# How closely exact composition is searched, relatively.
_CLOSE = 3e-4
# The digits of a parameter that is found by exact composition, and at the best order: a service that starts again on
# another processor must find the same one to the last bit, or it would pay for tokens of another event.
_DIGITS, _MANY_DIGITS = 5, 9
# Cells of a grid from 0 to the largest loss of a token, with which the search begins.
_CELLS = 16
# The first step beyond what Rényi divergences allow: exact composition allows some hundredths more.
_STEP = 1.08
# Composing more tokens takes minutes.
_MAX_COUNTED = 2**20
# The fractions by which a parameter is taken smaller, one after the other, until it fits.
_MARGINS = (0.0, 1e-9, 1e-7, 1e-5, 1e-3)


@dataclass(frozen=True)
class Cost:
    """Holds the cost of ``tokens`` released tokens of one event at ``delta``.

    Attributes:
        epsilon_rdp: from Rényi divergences at ``best_order``.
        best_order: the order with the smallest epsilon, the one to fix when a ledger is created.
        epsilon_pld: from the privacy loss distribution; None if no dominating pair is known, or if the Rényi epsilon
            or the number of tokens is too large to compose it.
    """

    event: Event
    tokens: int
    delta: float
    epsilon_rdp: float
    best_order: float
    epsilon_pld: float | None

    @property
    def epsilon(self) -> float:
        """What a ledger counts for these tokens: the smaller of the two, where it may compose them exactly."""
        if self.epsilon_pld is None or self.event.measured:
            return self.epsilon_rdp
        return min(self.epsilon_rdp, self.epsilon_pld)


def cost(
    event: Event,
    tokens: int,
    delta: float,
    orders: Orders = accounting.ORDERS,
    *,
    before: Spent[Event] | None = None,
) -> Cost:
    """Returns the cost of ``tokens`` tokens of ``event`` after what was spent ``before``, at the best of the orders.

    Raises:
        ValueError: ``tokens`` is negative or ``delta`` outside (0, 1).
    """
    spent = {event: tokens, **(before or {})}
    best = accounting.epsilon(accounting.rdp(spent, orders), delta, orders)
    too_large = counting.MAX_EPSILON < best.epsilon < math.inf or composition.paid(event, tokens) > _MAX_COUNTED
    return Cost(
        event=event,
        tokens=tokens,
        delta=delta,
        epsilon_rdp=best.epsilon,
        best_order=best.order,
        epsilon_pld=None if too_large else accounting.pld_epsilon(spent, delta),
    )


def largest(
    event: Callable[[float], Event],
    tokens: int,
    epsilon: float,
    delta: float,
    bounds: tuple[float, float],
    *,
    kept: Accountant | None = None,
    before: Spent[Event] | None = None,
) -> float:
    """Returns the largest parameter within ``bounds`` for which ``tokens`` tokens stay within (epsilon, delta).

    Where the ledger may count tokens (`counting.is_countable`), exact composition (README, Theorem 5) is tried beyond
    what Rényi divergences allow.

    Args:
        event: maps a value of the parameter to the event of one token. The cost grows with the parameter.
        bounds: the smallest and the largest value to consider.
        kept: of the ledger, if it exists. What it was planned with stays; one without a counter gets no exact plan.
        before: what is spent besides, such as on a private base.

    Raises:
        ValueError: even the smallest value costs more than the budget.
    """
    if (planned := _planned(event, tokens, kept)) is not None:
        return planned
    search = _Search(event, tokens, epsilon, delta, bounds, before or {})
    by_order = search.by_order()
    if by_order is None:
        besides = " besides the private base" if before else ""
        raise ValueError(
            f"epsilon {accounting.stated(epsilon)} at delta {delta:g} does not last for {tokens} tokens{besides}"
        )
    if kept is not None and kept.tokens is None:
        return by_order
    return search.by_counting(by_order)


def smallest(
    event: Callable[[float], Event],
    tokens: int,
    epsilon: float,
    delta: float,
    bounds: tuple[float, float],
    *,
    kept: Accountant | None = None,
    before: Spent[Event] | None = None,
) -> float:
    """Returns the smallest positive parameter within the budget, if the cost falls with it (such as a noise scale).

    See `largest` for the arguments.
    """
    if (planned := _planned(event, tokens, kept)) is not None:
        return planned
    least, most = bounds
    inverse_bounds = (1 / most, 1 / least)
    return 1 / largest(
        lambda inverse: event(1 / inverse), tokens, epsilon, delta, inverse_bounds, kept=kept, before=before
    )


def _planned(event: Callable[[float], Event], tokens: int, kept: Accountant | None) -> float | None:
    """Returns the parameter with which the ledger was planned, if it was for these tokens and for such an event."""
    if kept is None or kept.tokens != tokens or kept.event is None:
        return None
    values = (value for value in vars(kept.event).values() if isinstance(value, float))
    return next((value for value in values if _same(event, value, kept.event)), None)


def _same(event: Callable[[float], Event], value: float, planned: Event) -> bool:
    try:
        return event(value) == planned
    except ValueError:  # it is another parameter
        return False


@dataclass(frozen=True)
class _Search:
    """Searches the largest parameter within a budget, by one way of composing after the other; see `largest`."""

    event: Callable[[float], Event]
    tokens: int
    epsilon: float
    delta: float
    bounds: tuple[float, float]
    before: Spent[Event]

    def by_order(self) -> float | None:
        """Returns the largest parameter at the best of the orders; None if even the smallest costs too much."""
        low, high = self.bounds
        if self._excess(low) > 0:
            return None
        if self._excess(high) <= 0:
            return high
        found = float(scipy.optimize.brentq(self._excess, low, high, xtol=1e-12 * low, rtol=1e-12))
        # Tiny divergences have fewer digits than the search asks for.
        smaller = (_rounded_down(found * (1 - margin), _MANY_DIGITS) for margin in _MARGINS)
        return next((value for value in smaller if value > low and self._excess(value) <= 0), low)

    def by_counting(self, least: float) -> float:
        """Returns the largest parameter by exact composition, or ``least``, which fits, if that is not larger."""
        most = self.bounds[1]
        if self.tokens > _MAX_COUNTED or not counting.is_countable(self.event(least), self.epsilon):
            return least

        def excess(value: float, interval: float) -> float:
            return counting.excess(self.event(value), self.tokens, self.epsilon, self.delta, self.before, interval)

        # Losses are rounded up to a grid. One that is coarse beside a token's largest loss finds nearly the same
        # parameter.
        coarse = max(PLD_INTERVAL, float(self.event(least).rdp(accounting.ORDERS[-1:])[0]) / _CELLS)
        interval = next((grid for grid in (coarse, PLD_INTERVAL) if excess(least, grid) <= 0), None)
        if interval is None:
            return least
        fits = too_large = least
        while excess(too_large, interval) <= 0:
            if too_large == most:
                return most
            fits, too_large = too_large, min(most, _STEP * too_large)
        found = float(scipy.optimize.brentq(lambda value: excess(value, interval), fits, too_large, xtol=_CLOSE * fits))
        rounded = _rounded_down(found * (1 - _CLOSE), _DIGITS)
        return rounded if rounded > least and excess(rounded, PLD_INTERVAL) <= 0 else least

    def _excess(self, value: float) -> float:
        """Returns what a parameter costs above epsilon at the best of the orders."""
        tokens = composition.payments({self.event(value): self.tokens})
        return _cost_by_order(composition.payments(self.before), tokens, self.delta) - self.epsilon


@lru_cache(maxsize=2048)
def _cost_by_order(before: composition.Payments, tokens: composition.Payments, delta: float) -> float:
    """Returns the epsilon at the best of the orders.

    It is kept: plans that are compared roughly are made again exactly, and each comparison makes them once more.
    """
    return accounting.epsilon(accounting.rdp(dict(before)) + accounting.rdp(dict(tokens)), delta).epsilon


def _rounded_down(value: float, digits: int) -> float:
    return float(Context(prec=digits, rounding=ROUND_FLOOR).create_decimal(Decimal(value)))
