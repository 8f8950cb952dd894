"""Counts tokens against a number that is fixed when the ledger is made (privacy/README.md, Theorem 5)."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from privmix.privacy import accounting
from privmix.privacy.accounting import counting
from privmix.privacy.events import Event, from_json

# A block of tokens of another event costs about this fraction of the whole budget: with larger blocks the price is
# closer to the ratio of the costs, with smaller ones less is left over at the end.
_BLOCKS = 16


class TokenCounter(BaseModel):
    """Limits the ledger to a number of tokens of one event, and to what dominates tokens of other events.

    It does not depend on which event comes when, so a number of parts that changes voids nothing. A token of another
    event belongs to a block of tokens of that event, which is paid when its first token is charged.

    Attributes:
        event: the event, as JSON, whose tokens are the unit.
        tokens: the largest number of these tokens.
        planned: the number for which the event was planned; None in a ledger that was planned by Rényi divergences.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    event: str
    tokens: int = Field(gt=0)
    planned: int | None = Field(None, gt=0)

    @property
    def unit(self) -> Event:
        return from_json(self.event)

    def used(self, spent: Mapping[Event, int], delta: float) -> int:
        """Returns how many tokens of the unit pay for everything that is spent.

        Raises:
            ValueError: an event has no privacy loss distribution, or costs more than all tokens.
        """
        return sum(self._paid(event, count, delta) for event, count in spent.items() if count)

    def affordable(self, spent: Mapping[Event, int], event: Event, delta: float) -> int:
        """Returns the largest number of further tokens of `event`, which costs something and is not paid once.

        Raises:
            ValueError: see `used`.
        """
        left = self.tokens - self.used(spent, delta)
        if event == self.unit:
            return max(0, left)
        size = self.block(event)
        begun = -spent.get(event, 0) % size  # tokens of a block that is paid for
        return 0 if left < 0 else begun + left // self._price(event, size, delta) * size

    def block(self, event: Event) -> int:
        """Returns the number of tokens in a block of another event; 1 for an event that is paid once."""
        if event.once:
            return 1
        ratio = float(event.rdp([2.0])[0] / self.unit.rdp([2.0])[0])
        return max(1, int(self.tokens / _BLOCKS / ratio))

    def _paid(self, event: Event, count: int, delta: float) -> int:
        if event == self.unit:
            return count
        if not any(event.rdp([2.0])):
            return 0
        size = self.block(event)
        return -(-accounting.paid(event, count) // size) * self._price(event, size, delta)

    def _price(self, event: Event, size: int, delta: float) -> int:
        price = counting.price(event, size, self.unit, self.tokens, delta)
        if price is None:
            raise ValueError(
                f"{event} has no privacy loss distribution that {self.tokens} tokens of this ledger dominate: the "
                f"ledger counts tokens of {self.unit}; serve with that protocol"
            )
        return price
