"""Plans a budget: computes the cost of a number of tokens, and the largest parameter that a budget allows."""

from collections.abc import Callable
from dataclasses import dataclass

import scipy

from services.privacy import accounting
from services.privacy.accounting.composition import Spent
from services.privacy.events import Event, Orders


@dataclass(frozen=True)
class Cost:
    """Holds the cost of ``tokens`` released tokens of one event at ``delta``.

    Attributes:
        epsilon_rdp: from Rényi divergences at ``best_order``.
        best_order: the order with the smallest epsilon, the one to fix when a ledger is created.
        epsilon_pld: from the privacy loss distribution; None if no dominating pair is known.
    """

    event: Event
    tokens: int
    delta: float
    epsilon_rdp: float
    best_order: float
    epsilon_pld: float | None


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
    return Cost(
        event=event,
        tokens=tokens,
        delta=delta,
        epsilon_rdp=best.epsilon,
        best_order=best.order,
        epsilon_pld=accounting.pld_epsilon(spent, delta),
    )


def largest(
    event: Callable[[float], Event],
    tokens: int,
    epsilon: float,
    delta: float,
    bounds: tuple[float, float],
    orders: Orders = accounting.ORDERS,
    before: Spent[Event] | None = None,
) -> float:
    """Returns the largest parameter within ``bounds`` for which ``tokens`` tokens stay within (epsilon, delta).

    Args:
        event: maps a value of the parameter to the event of one token. The cost grows with the parameter.
        tokens: the number of tokens that the budget must last for.
        epsilon: the budget's epsilon, compared with the conversion from Rényi divergences.
        delta: the budget's delta.
        bounds: the smallest and the largest value to consider.
        orders: the Rényi orders to convert from. A small epsilon needs large orders, about log(1 / delta) / epsilon.
        before: what is spent besides, such as on a private base.

    Raises:
        ValueError: even the smallest value costs more than the budget.
    """

    earlier = accounting.rdp(before or {}, orders)

    def excess(value: float) -> float:
        divergences = earlier + accounting.rdp({event(value): tokens}, orders)
        return accounting.epsilon(divergences, delta, orders).epsilon - epsilon

    low, high = bounds
    if excess(low) > 0:
        besides = " besides the private base" if before else ""
        raise ValueError(
            f"epsilon {accounting.stated(epsilon)} at delta {delta:g} does not last for {tokens} tokens{besides}"
        )
    if excess(high) <= 0:
        return high
    width = 1e-12 * high
    return max(low, float(scipy.optimize.bisect(excess, low, high, xtol=width)) - 2 * width)


def smallest(
    event: Callable[[float], Event],
    tokens: int,
    epsilon: float,
    delta: float,
    bounds: tuple[float, float],
    orders: Orders = accounting.ORDERS,
    before: Spent[Event] | None = None,
) -> float:
    """Returns the smallest positive parameter within the budget, if the cost falls with it (such as a noise scale).

    See `largest` for the arguments.
    """
    least, most = bounds
    return 1 / largest(
        lambda inverse: event(1 / inverse), tokens, epsilon, delta, (1 / most, 1 / least), orders, before
    )
