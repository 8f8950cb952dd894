"""Defines the settings of a protocol, which an operator chooses, and derives the protocol from them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self
from typing import Protocol as Structure

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from privmix.foundation.units import DELTA, EPSILON, TOKENS
from privmix.privacy import accounting
from privmix.privacy.accounting import planning
from privmix.privacy.events import Accountant, Event, Guarantee
from privmix.privacy.protocol import Protocol

Enforced = Literal["bound", "measured"]

WhenExhausted = Literal["refuse", "public", "base"]
"""What happens when the budget is used up: requests are refused, or the public model or the private base answers."""

ROUNDING_MARGIN = 1 - 1e-12
"""The factor that leaves room for rounding when a budget is divided among tokens, so that the last token fits."""


class Training(Structure):
    """Describes a private training: its event and its guarantee."""

    @property
    def event(self) -> Event: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def delta(self) -> float: ...


class Settings(BaseModel, ABC):
    """Holds the parameters of one protocol, the section `privacy` of the configuration.

    A subclass has a field ``protocol`` whose only value is the protocol's name, and one field with a description for
    each parameter. A parameter that the budget determines is None by default.

    Attributes:
        mechanism: the class of the protocol.
        choose: when to choose this protocol, in words.
        derived: the parameter that follows from the budget unless it is set; None if there is none.
        one_model: whether the protocol serves the only model of an ensemble of one part.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    mechanism: ClassVar[type[Protocol]]
    choose: ClassVar[str]
    derived: ClassVar[str | None] = None
    one_model: ClassVar[bool] = False

    protocol: str
    epsilon: float | None = Field(EPSILON, gt=0, description="the budget: epsilon after `tokens` tokens")
    delta: float = Field(DELTA, gt=0, lt=1, description="the budget's delta")
    tokens: int = Field(TOKENS, gt=0, description="the number of tokens that the budget must last for")
    _base: Event | None = PrivateAttr(None)

    def on_base(self, base: Event | None) -> Self:
        """Returns these settings for parts on a private base, whose event the budget pays besides the tokens."""
        settings = self.model_copy()
        settings._base = base
        return settings

    @property
    def spent_before(self) -> Mapping[Event, int]:
        """What the budget pays besides the tokens."""
        return {} if self._base is None else {self._base: 1}

    @property
    def budget(self) -> float:
        """The budget's epsilon.

        Raises:
            ValueError: epsilon is None, but this protocol needs a budget.
        """
        if self.epsilon is None:
            raise ValueError(f"epsilon must be a number: {self.protocol} needs a budget")
        return self.epsilon

    @abstractmethod
    def plan(self, parts: int, kept: Accountant | None = None) -> Protocol:
        """Returns the protocol for an ensemble, with unset parameters derived from the budget.

        Args:
            parts: N, the number of parts.
            kept: of the ledger, if it exists: what is planned fits its composition.

        Raises:
            ValueError: the budget is too small, or fields contradict each other. The message names the field.
        """

    def largest(self, event: Callable[[float], Event], bounds: tuple[float, float], kept: Accountant | None) -> float:
        """Returns the largest parameter of an event at which the budget lasts. See `planning.largest`."""
        spent = self.spent_before
        return planning.largest(event, self.tokens, self.budget, self.delta, bounds, kept=kept, before=spent)

    def smallest(self, event: Callable[[float], Event], bounds: tuple[float, float], kept: Accountant | None) -> float:
        """Returns the smallest parameter of an event at which the budget lasts. See `planning.smallest`."""
        spent = self.spent_before
        return planning.smallest(event, self.tokens, self.budget, self.delta, bounds, kept=kept, before=spent)

    @property
    def planned(self) -> int | None:
        """The number of tokens from which the derived parameter follows; None if it is set, or there is none."""
        return None if self.derived is None or getattr(self, self.derived) is not None else self.tokens

    @property
    def enforced(self) -> Enforced:
        """What the budget limits: the data-independent bound, or the losses measured on the private text."""
        return "bound"

    @property
    def stop_within(self) -> int | None:
        """The largest number of tokens from which a random stop is drawn; None for no such stop."""
        return None

    @property
    def horizon(self) -> int | None:
        """The number of tokens over which the parts plan to spend their accounts; None without accounts."""
        return None

    @property
    def when_exhausted(self) -> Literal["refuse", "public"]:
        """The default behaviour when the budget is used up: refuse requests, or answer with the public model."""
        return "refuse"

    def derived_from(self, protocol: Protocol) -> Mapping[str, float]:
        """Returns the value of the derived parameter by name; empty if there is none."""
        value = getattr(protocol, self.derived, None) if self.derived else None
        return {} if value is None else {str(self.derived): value}

    def details(self, protocol: Protocol) -> Mapping[str, Any]:
        """Returns what `privmix plan` shows besides the protocol's parameters and costs."""
        return {}

    def sentence(self, guarantee: Guarantee, cost: float | None, tokens: int) -> str:
        """Returns a guarantee of these settings in one sentence, for tokens that cost `cost`; None has no bound."""
        if self.enforced == "measured":
            return guarantee.stopped_by_losses(accounting.stated(self.epsilon), self.delta)
        if cost is None:
            return guarantee.sentence(accounting.stated(self.epsilon), self.delta, None)
        return guarantee.sentence(accounting.shown(cost), self.delta, tokens)

    def for_training(self, training: Training | None) -> Self:
        """Returns these settings, completed with the guarantee of the ensemble's private training, if there was one.

        Raises:
            ValueError: the protocol does not support the ensemble's training.
        """
        if training is not None:
            raise ValueError(
                f"protocol: {self.protocol} would ignore the guarantee of this ensemble, which was trained with DP-SGD "
                "for any number of tokens; choose `protocol: dp-sgd`"
            )
        return self
