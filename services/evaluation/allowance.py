"""What a ledger would grant, token by token, for as long as an evaluation lasts. Nothing is written down."""

import math
from collections import Counter
from collections.abc import Sequence

from services.budget.filter import NO_LOSSES, Filter
from services.budget.privacy_budget import PrivacyBudget
from services.privacy import accounting
from services.privacy.events import Event
from services.privacy.protocol import Protocol
from services.privacy.settings import Settings

_ANY_ORDER = 2.0


class Allowance:
    """The filter of the budget's ledger, and what one evaluation has spent of it."""

    def __init__(self, settings: Settings, protocol: Protocol) -> None:
        self._filter = Filter(_terms(settings, protocol))
        self._event = protocol.event
        self._spent: Counter[Event] = Counter()
        self._losses = NO_LOSSES
        self._stopped = False

    @property
    def spent(self) -> int:
        """Tokens that the protocol answered."""
        return self._spent[self._event]

    @property
    def epsilon(self) -> float:
        """What the tokens so far came to at the ledger's order; private where losses are measured."""
        return self._filter.epsilon(self._spent, self._losses)

    def before(self, wanted: int) -> int:
        """How many of so many tokens may be asked for."""
        if self._stopped:
            return 0
        if self._event.measured:
            return wanted
        granted = self._filter.affordable(self._spent, self._event, wanted)
        self._spend(granted, wanted)
        return granted

    def after(self, losses: Sequence[Sequence[float]] | None, asked: int) -> int:
        """How many of the first of these tokens may leave, now that it is known what each has lost."""
        if losses is None or not self._event.measured:
            return asked
        granted = self._filter.affordable_measured(self._spent, self._losses, self._event, losses)
        for loss in losses[:granted]:
            self._losses = self._losses.plus(loss)
        self._spend(granted, asked)
        return granted

    def _spend(self, granted: int, wanted: int) -> None:
        self._spent[self._event] += granted
        # Whether a later token would have fitted is private, too: the first that does not is the end.
        self._stopped = granted < wanted


def _terms(settings: Settings, protocol: Protocol) -> PrivacyBudget:
    return PrivacyBudget(
        ensemble="evaluation",
        epsilon=settings.epsilon,
        delta=settings.delta,
        order=protocol.order or _best_order(protocol.event, settings),
        adjacency=protocol.guarantee.adjacency,
        enforced=settings.enforced,
    )


def _best_order(event: Event, settings: Settings) -> float:
    divergences = accounting.rdp({event: settings.tokens})
    if not divergences.any() or not math.isfinite(divergences.min()):
        return _ANY_ORDER
    return accounting.epsilon(divergences, settings.delta).order
