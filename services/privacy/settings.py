"""What an operator chooses of a protocol, and what follows from it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.privacy.protocol import Protocol

Enforced = Literal["bound", "measured"]

ROOM = 1 - 1e-12
"""What a budget split over its tokens leaves for rounding, so that the last of them is granted."""


class Settings(BaseModel, ABC):
    """Parameters of one protocol, as they stand under `privacy` in the configuration.

    A subclass has a field ``protocol`` whose only value is the protocol's name, and one field, with a description, for
    each parameter. A parameter that the budget determines is None by default.

    Attributes:
        asks: what is asked of the models for a token.
        choose: when to choose this protocol.
        derived: the parameter that follows from the budget unless it is given; None where none does.
        one_model: whether the protocol serves the one model of an ensemble of one part.
        variants: parameters besides the defaults under which the protocol is another mechanism; audits try each.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    asks: ClassVar[str]
    choose: ClassVar[str]
    derived: ClassVar[str | None] = None
    one_model: ClassVar[bool] = False
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ()

    protocol: str
    epsilon: float | None = Field(8.0, gt=0, description="the budget: epsilon after `tokens` tokens")
    delta: float = Field(1e-5, gt=0, lt=1, description="the budget's delta")
    tokens: int = Field(1024, gt=0, description="how many tokens the budget must last for")

    @property
    def budget(self) -> float:
        """The budget's epsilon.

        Raises:
            ValueError: there is none, and this protocol cannot do without.
        """
        if self.epsilon is None:
            raise ValueError(f"epsilon must be a number: {self.protocol} keeps to a budget")
        return self.epsilon

    @abstractmethod
    def plan(self, parts: int, order: float | None = None) -> Protocol:
        """The protocol for an ensemble of so many parts, with everything that was not chosen derived from the budget.

        Args:
            parts: N.
            order: the Rényi order at which the ledger enforces the budget, where there is a ledger already; for
                protocols whose parameters or measured losses depend on it.

        Raises:
            ValueError: the budget cannot be kept, or the fields contradict each other; names the field.
        """

    @property
    def enforced(self) -> Enforced:
        """What the budget limits: the data-independent bound, or the losses measured on the private text."""
        return "bound"

    @property
    def stop_within(self) -> int | None:
        """Up to how many tokens a stop is drawn from, at random; None for no such stop."""
        return None

    @property
    def when_exhausted(self) -> Literal["refuse", "public"]:
        """What follows the end of the budget where the configuration does not say."""
        return "refuse"

    def details(self, protocol: Protocol) -> Mapping[str, Any]:
        """What `privmix plan` shows of this protocol besides its parameters and what they cost."""
        return {}
