"""Decides what fits into the budget: by the Rényi filter at one fixed order (Feldman & Zrnic 2021), or by a counter."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache, partial
from itertools import accumulate, islice, takewhile, zip_longest

import numpy as np

from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.token_counter import TokenCounter
from privmix.privacy import accounting
from privmix.privacy.accounting import counting
from privmix.privacy.events import Divergences, Event

# Means "no limit": more tokens than any service will ever release.
UNLIMITED = 2**62

# Counts are composed exactly, but the conversion to an epsilon rounds a few times. The filter keeps this margin,
# relative to 1 + epsilon, below the budget.
SLACK = 2.0**-50

# The number of values of a counter's epsilon: each takes a fraction of a second, and is computed once.
_STEPS = 32


@dataclass(frozen=True, slots=True)
class Losses:
    """Holds accumulated Rényi losses at the ledger's order, rounded up.

    Attributes:
        alike: the loss that all parts share.
        parts: the additional loss of each part, by its index. Indices do not change when the ensemble grows.
    """

    alike: float = 0.0
    parts: tuple[float, ...] = ()

    @property
    def largest(self) -> float:
        """The total loss of the part with the largest loss."""
        return _sum_up(self.alike, max(self.parts, default=0.0))

    def plus(self, losses: Sequence[float]) -> "Losses":
        """Adds the losses of one token: one number that holds for all parts, or one number for each part."""
        if len(losses) == 1:
            return Losses(_sum_up(self.alike, losses[0]), self.parts)
        return Losses(self.alike, tuple(_sum_up(a, b) for a, b in zip_longest(self.parts, losses, fillvalue=0.0)))


NO_LOSSES = Losses()


def are_losses(losses: Sequence[float]) -> bool:
    """Returns whether these are valid losses of a token: at least one number, none negative or NaN."""
    return len(losses) > 0 and all(loss >= 0 and not math.isnan(loss) for loss in losses)


def _sum_up(a: float, b: float) -> float:
    """Returns a + b rounded up. The sum is exact if one of them is 0."""
    return math.nextafter(a + b, math.inf) if a and b else a + b


@cache
def cost(event: Event, order: float) -> float:
    """Returns the Rényi cost of one token at this order; inf if the event has no data-independent bound.

    Raises:
        ValueError: the event returns a negative number or NaN.
    """
    (rdp,) = np.asarray(event.rdp(np.array([order])), dtype=np.float64)
    if not rdp >= 0:
        raise ValueError(f"{event} costs {rdp} at order {order:g}; a cost is a non-negative number")
    return float(rdp)


@dataclass(frozen=True)
class Filter:
    """Decides from the ledger's counts and losses alone, so that every decision can be reproduced from the ledger."""

    terms: PrivacyBudget

    def epsilon(self, spent: Mapping[Event, int], losses: Losses = NO_LOSSES) -> float:
        """Returns the epsilon of these tokens and the private base at the budget's delta and order.

        It is subject to float rounding. If the budget limits measured losses, `losses` replace the bounds of the tokens
        with measured events. A counter rounds up to the next 32nd of its tokens.
        """
        if self.terms.counter is not None:
            return _counted_epsilon(self.terms, self.stated_tokens(spent))
        return self._composed(self.paid(spent), losses)

    def estimate(self, spent: Mapping[Event, int]) -> float:
        """Returns the epsilon of these tokens and the private base at the best of the tracked orders.

        The budget's order is the best one for the whole budget and overstates the cost of a few tokens. The estimate is
        never above `epsilon`. It guarantees nothing if events were chosen after looking at answers.
        """
        best = accounting.epsilon(_divergences(self.paid(spent)), self.terms.delta).epsilon
        return min(best, self.epsilon(spent))

    def stated_tokens(self, spent: Mapping[Event, int]) -> int:
        """Returns the number of tokens of its counter's event for which `epsilon` is stated, at least those that pay.

        Raises:
            ValueError: the budget has no counter; see `TokenCounter.used` too.
        """
        if (counter := self.terms.counter) is None:
            raise ValueError("the budget has no counter")
        used, step = counter.used(spent, self.terms.delta), -(-counter.tokens // _STEPS)
        return used if used > counter.tokens else min(counter.tokens, -(-used // step) * step)

    def paid(self, spent: Mapping[Event, int]) -> Mapping[Event, int]:
        """Returns what one person may have paid: these tokens, and the private base."""
        base = self.terms.base_event
        return spent if base is None else {**spent, base: 1}

    def _composed(self, spent: Mapping[Event, int], losses: Losses) -> float:
        measured = self.terms.enforced == "measured"
        bounded = {event: count for event, count in spent.items() if count and not (measured and event.measured)}
        costs = [(accounting.paid(event, count), cost(event, self.terms.order)) for event, count in bounded.items()]
        costs.append((1, losses.largest if measured else 0.0))
        if any(math.isinf(rdp) for _, rdp in costs):
            return math.inf
        exact = sum((count * Fraction(rdp) for count, rdp in costs), Fraction())
        epsilon = accounting.epsilon(np.array([_nearest(exact)]), self.terms.delta, [self.terms.order]).epsilon
        return min(epsilon, self._single_release_epsilon(bounded, losses.largest if measured else 0.0))

    def affordable(
        self, spent: Mapping[Event, int], event: Event, wanted: int = UNLIMITED, losses: Losses = NO_LOSSES
    ) -> int:
        """Returns the largest number, up to `wanted`, of further tokens of `event` that fit after `spent`.

        Raises:
            ValueError: the event has no finite bound, so it fits no budget.
        """
        if (counter := self.terms.counter) is not None and not self.is_free(spent, event) and not event.once:
            return min(wanted, counter.affordable(spent, event, self.terms.delta))
        if self.terms.epsilon is not None and math.isinf(cost(event, self.terms.order)):
            raise ValueError(f"{event} costs inf at order {self.terms.order:g}; a budget needs a finite cost")

        def too_many(tokens: int) -> bool:
            return not self._fits({**spent, event: spent.get(event, 0) + tokens}, losses)

        if not too_many(wanted):  # the usual case
            return wanted
        return max(0, bisect_left(range(wanted + 1), True, key=too_many) - 1)

    def is_free(self, spent: Mapping[Event, int], event: Event) -> bool:
        """Returns whether further tokens of `event` cost nothing."""
        return (
            self.terms.epsilon is None
            or (event.once and spent.get(event, 0) > 0)
            or (not event.measured and cost(event, self.terms.order) == 0)
        )

    def affordable_measured(
        self, spent: Mapping[Event, int], losses: Losses, event: Event, tokens: Sequence[Sequence[float]]
    ) -> int:
        """Returns how many of the first `tokens`, given by their losses, fit after `spent` and `losses`."""
        if self.terms.enforced == "bound":
            return self.affordable(spent, event, len(tokens))
        totals = islice(accumulate(tokens, Losses.plus, initial=losses), 1, None)
        return sum(1 for _ in takewhile(partial(self._fits, spent), totals))

    def _single_release_epsilon(self, spent: Mapping[Event, int], measured: float) -> float:
        """Returns the epsilon by the privacy loss distribution if only one event costs, and only once; otherwise inf.

        No composition happens then, so the exact conversion is valid whenever later events are chosen.
        """
        costly = [event for event in spent if cost(event, self.terms.order)]
        alone = len(costly) == 1 and costly[0].once and not measured
        return _pld_epsilon(costly[0], self.terms.delta) if alone else math.inf

    def _fits(self, spent: Mapping[Event, int], losses: Losses) -> bool:
        if self.terms.epsilon is None:
            return True
        if (counter := self.terms.counter) is not None:
            return counter.used(spent, self.terms.delta) <= counter.tokens
        return self.epsilon(spent, losses) <= self.terms.epsilon - SLACK * (1 + self.terms.epsilon)


def counted(terms: PrivacyBudget, event: Event, planned: int | None = None) -> PrivacyBudget:
    """Returns the budget with a counter of tokens of `event`, where that allows more of them than the filter does.

    Call it only for a ledger that does not exist yet: the number must be fixed before the first token.

    Args:
        planned: the number of tokens from which the event follows, which the filter may not allow; None if the
            operator chose the event.
    """
    if terms.epsilon is None or terms.enforced != "bound" or not math.isfinite(cost(event, terms.order)):
        return terms
    if not Filter(terms)._fits({}, NO_LOSSES):  # the private base alone costs more, which no counter of tokens sees
        return terms
    by_filter = Filter(terms).affordable({}, event)
    before = {} if terms.base_event is None else {terms.base_event: 1}
    if by_filter == UNLIMITED:
        return terms
    starts = [least for least in (planned or 0, by_filter) if least >= max(1, by_filter)]
    counts = (counting.largest_count(event, terms.epsilon, terms.delta, before, least) for least in starts)
    exact = next((count for count in counts if count is not None), by_filter)
    if exact == by_filter:
        return terms
    return terms.model_copy(
        update={"counter": TokenCounter(event=event.to_json(), tokens=exact, planned=planned)},
    )


@lru_cache(maxsize=1024)
def _counted_epsilon(terms: PrivacyBudget, used: int) -> float:
    """Returns the epsilon of `used` tokens of the counter's event, together with the private base.

    Blocks of tokens take a part of delta, so tokens are converted at what remains, and the base with them. Before the
    first token there is one release and no block, so the base's cost is that of a ledger without a counter: converted
    at all of delta. A ledger that is about to be made has no counter yet, and finds the same number.
    """
    assert terms.counter is not None
    event, delta = terms.counter.unit, terms.delta
    before = {} if terms.base_event is None else {terms.base_event: 1}
    return counting.epsilon(event, used, delta, before) if used else Filter(terms)._composed(before, NO_LOSSES)


def _divergences(spent: Mapping[Event, int]) -> Divergences:
    total = np.zeros_like(accounting.ORDERS)
    for event, count in spent.items():
        if times := accounting.paid(event, count):  # the divergence of no token is 0, even if a token's is infinite
            total += times * _token_divergences(event)
    return total


@cache
def _token_divergences(event: Event) -> Divergences:
    return event.rdp(accounting.ORDERS)


@cache
def _pld_epsilon(event: Event, delta: float) -> float:
    epsilon = accounting.pld_epsilon({event: 1}, delta)
    return math.inf if epsilon is None else epsilon


def _nearest(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf
