"""Implements a budget for evaluations: it decides like a ledger with the same budget, but stores nothing."""

from collections import Counter
from collections.abc import Sequence

from privmix.budget.accounts import NO_ACCOUNTS, Grains
from privmix.budget.filter import NO_LOSSES, Filter
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.privacy.events import Event


class InMemoryBudget:
    """Reserves and charges tokens of one event, as `BudgetClient` does with the ledger's actor.

    A test holds both to the same answers.
    """

    def __init__(self, terms: PrivacyBudget, event: Event) -> None:
        self._filter = Filter(terms)
        self._event = event
        self._spent: Counter[Event] = Counter()
        self._losses = NO_LOSSES
        self._stopped = False
        self._accounts = NO_ACCOUNTS
        self._accounted = 0
        self._horizon = terms.horizon or 1

    @property
    def charged(self) -> int:
        """The number of charged tokens."""
        return self._spent[self._event]

    @property
    def epsilon(self) -> float:
        """The epsilon of the charged tokens at the budget's order. It is private if losses are measured."""
        return self._filter.epsilon(self._spent, self._losses)

    def reserve(self, count: int) -> int:
        """Returns how many of `count` tokens may be computed. Charges them if the event has a fixed cost."""
        if self._stopped:
            return 0
        if self._event.measured:
            return count
        granted = self._filter.affordable(self._spent, self._event, count)
        self._spend(granted, count)
        return granted

    def allowances(self, parts: int, wanted: int, least: int = 1) -> tuple[int, Grains]:
        """Returns how many of `wanted` tokens a lease has, at least `least`, and the allowance of each, by part."""
        count, _ = self._accounts.divide(parts, self._accounted, self._horizon, wanted)
        count = max(count, least)
        return count, self._accounts.allowances(parts, self._accounted, self._horizon, count)

    def charge_accounts(self, count: int, charges: Sequence[int]) -> None:
        """Charges the sum of what `count` tokens cost to each part's account."""
        self._accounted += count
        self._accounts = self._accounts.settle((), charges)

    def charge(self, losses: Sequence[Sequence[float]]) -> int:
        """Charges the losses of the first tokens that fit, where they are measured; returns how many may be released.

        Args:
            losses: for each token its losses, one for all parts or one a part.
        """
        if not self._event.measured:
            return len(losses)
        granted = self._filter.affordable_measured(self._spent, self._losses, self._event, losses)
        for loss in losses[:granted]:
            self._losses = self._losses.plus(loss)
        self._spend(granted, len(losses))
        return granted

    def _spend(self, granted: int, wanted: int) -> None:
        self._spent[self._event] += granted
        # Whether a later token would fit is private, too: the first that does not fit ends the budget.
        self._stopped = granted < wanted
