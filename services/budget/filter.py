"""The Rényi filter: what still fits into the budget, at one order fixed in advance (Feldman & Zrnic 2021)."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from itertools import accumulate, islice, takewhile, zip_longest

import numpy as np

from services.budget.privacy_budget import PrivacyBudget
from services.privacy import accounting
from services.privacy.events import Event

# Stands for "no limit": more tokens than any service will ever release.
UNLIMITED = 2**62

# Counts are composed exactly, but their conversion to an epsilon rounds a few times: what would fit by less than this,
# relative to 1 + epsilon, is refused.
SLACK = 2.0**-50


@dataclass(frozen=True, slots=True)
class Losses:
    """Rényi losses at the order of the ledger's terms, rounded up.

    `alike` is every part's; `parts` has what each part lost besides, by its index, which stays when an ensemble grows.
    """

    alike: float = 0.0
    parts: tuple[float, ...] = ()

    @property
    def largest(self) -> float:
        """That of the part which lost most."""
        return _sum_up(self.alike, max(self.parts, default=0.0))

    def plus(self, losses: Sequence[float]) -> "Losses":
        """With those of one more token: one number for every part alike, or one for each part."""
        if len(losses) == 1:
            return Losses(_sum_up(self.alike, losses[0]), self.parts)
        return Losses(self.alike, tuple(_sum_up(a, b) for a, b in zip_longest(self.parts, losses, fillvalue=0.0)))


NO_LOSSES = Losses()


def are_losses(losses: Sequence[float]) -> bool:
    """Whether these can be one token's: no negative number, and none that is no number."""
    return len(losses) > 0 and all(loss >= 0 and not math.isnan(loss) for loss in losses)


def _sum_up(a: float, b: float) -> float:
    """a + b, rounded up unless it is exact because one of them is 0."""
    return math.nextafter(a + b, math.inf) if a and b else a + b


@cache
def cost(event: Event, order: float) -> float:
    """What one token costs at this order; infinite where the event has no data-independent bound.

    Raises:
        ValueError: the event says a negative number, or none.
    """
    (rdp,) = np.asarray(event.rdp(np.array([order])), dtype=np.float64)
    if not rdp >= 0:
        raise ValueError(f"{event} costs {rdp} at order {order:g}; a cost is a non-negative number")
    return float(rdp)


@dataclass(frozen=True)
class Filter:
    """Decides by counts and recorded losses alone, so a decision can be made again from the ledger at any time."""

    terms: PrivacyBudget

    def epsilon(self, spent: Mapping[Event, int], losses: Losses = NO_LOSSES) -> float:
        """The epsilon, at the terms' delta and order, of these tokens, rounded like any float.

        Where the budget limits measured losses, they stand for the tokens whose event is measured.
        """
        measured = self.terms.enforced == "measured"
        bounded = {event: count for event, count in spent.items() if count and not (measured and event.measured)}
        costs = [(accounting.paid(event, count), cost(event, self.terms.order)) for event, count in bounded.items()]
        costs.append((1, losses.largest if measured else 0.0))
        if any(math.isinf(each) for _, each in costs):
            return math.inf
        exact = sum((count * Fraction(each) for count, each in costs), Fraction())
        epsilon = accounting.epsilon(np.array([_nearest(exact)]), self.terms.delta, [self.terms.order]).epsilon
        return min(epsilon, self._of_one_release(bounded, losses.largest if measured else 0.0))

    def affordable(
        self, spent: Mapping[Event, int], event: Event, wanted: int = UNLIMITED, losses: Losses = NO_LOSSES
    ) -> int:
        """How many of `wanted` more tokens of `event` fit after `spent`: the most that do, and never one too many.

        Raises:
            ValueError: the event has no bound, so no budget can hold it.
        """
        if self.terms.epsilon is not None and math.isinf(cost(event, self.terms.order)):
            raise ValueError(f"{event} costs inf at order {self.terms.order:g}; a budget needs a finite cost")

        def too_many(tokens: int) -> bool:
            return not self._fits({**spent, event: spent.get(event, 0) + tokens}, losses)

        if not too_many(wanted):  # nearly always
            return wanted
        return max(0, bisect_left(range(wanted + 1), True, key=too_many) - 1)

    def is_free(self, spent: Mapping[Event, int], event: Event) -> bool:
        """Whether more tokens of `event` change nothing that the budget limits."""
        return (
            self.terms.epsilon is None
            or (event.once and spent.get(event, 0) > 0)
            or (not event.measured and cost(event, self.terms.order) == 0)
        )

    def affordable_measured(
        self, spent: Mapping[Event, int], losses: Losses, event: Event, tokens: Sequence[Sequence[float]]
    ) -> int:
        """How many of the first of these tokens of `event`, each with its losses, fit after `spent` and `losses`."""
        if self.terms.enforced == "bound":
            return self.affordable(spent, event, len(tokens))
        totals = islice(accumulate(tokens, Losses.plus, initial=losses), 1, None)
        return sum(1 for _ in takewhile(partial(self._fits, spent), totals))

    def _of_one_release(self, spent: Mapping[Event, int], measured: float) -> float:
        """By its privacy loss distribution, where all that costs is paid once, for nothing is composed then."""
        costly = [event for event in spent if cost(event, self.terms.order)]
        alone = len(costly) == 1 and costly[0].once and not measured
        return _pld_epsilon(costly[0], self.terms.delta) if alone else math.inf

    def _fits(self, spent: Mapping[Event, int], losses: Losses) -> bool:
        if self.terms.epsilon is None:
            return True
        return self.epsilon(spent, losses) <= self.terms.epsilon - SLACK * (1 + self.terms.epsilon)


@cache
def _pld_epsilon(event: Event, delta: float) -> float:
    epsilon = accounting.pld_epsilon({event: 1}, delta)
    return math.inf if epsilon is None else epsilon


def _nearest(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf
