"""What an operator chooses of a protocol, and what follows from it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self
from typing import Protocol as Structure

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.privacy.events import Event
from services.privacy.protocol import Protocol

Enforced = Literal["bound", "measured"]

ROOM = 1 - 1e-12
"""What a budget split over its tokens leaves for rounding, so that the last of them is granted."""


class Training(Structure):
    """How an ensemble was trained to keep a promise of its own."""

    @property
    def event(self) -> Event: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def delta(self) -> float: ...


class Settings(BaseModel, ABC):
    """Parameters of one protocol, as they stand under `privacy` in the configuration.

    A subclass has a field ``protocol`` whose only value is the protocol's name, and one field, with a description, for
    each parameter. A parameter that the budget determines is None by default.

    Attributes:
        mechanism: the protocol that is planned.
        asks: what is asked of the models for a token.
        choose: when to choose this protocol.
        derived: the parameter that follows from the budget unless it is given; None where none does.
        one_model: whether the protocol serves the one model of an ensemble of one part.
        refused: parameters that other protocols or earlier versions have and this one has not, with what to do instead.
        variants: parameters besides the defaults under which the protocol is another mechanism; audits try each.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    mechanism: ClassVar[type[Protocol]]
    asks: ClassVar[str]
    choose: ClassVar[str]
    derived: ClassVar[str | None] = None
    one_model: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = {}
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ()

    protocol: str
    epsilon: float | None = Field(8.0, gt=0, description="the budget: epsilon after `tokens` tokens")
    delta: float = Field(1e-5, gt=0, lt=1, description="the budget's delta")
    tokens: int = Field(1024, gt=0, description="how many tokens the budget must last for")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, fields: object) -> object:
        for name, instead in cls.refused.items():
            if isinstance(fields, Mapping) and name in fields:
                raise ValueError(f"{name}: {instead}")
        return fields

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

    def derived_from(self, protocol: Protocol) -> Mapping[str, float]:
        """The parameter that the budget determines, by its name, as the protocol has it; empty where there is none."""
        value = getattr(protocol, self.derived, None) if self.derived else None
        return {} if value is None else {str(self.derived): value}

    def details(self, protocol: Protocol) -> Mapping[str, Any]:
        """What `privmix plan` shows of this protocol besides its parameters and what they cost."""
        return {}

    def for_training(self, training: Training | None) -> Self:
        """These settings for an ensemble, with what follows from a promise that its training kept.

        Raises:
            ValueError: the protocol would promise something else than the training kept to.
        """
        if training is not None:
            raise ValueError(
                f"protocol: {self.protocol} would say nothing of the promise that this ensemble was trained to keep "
                "with DP-SGD, for any number of tokens; take `protocol: dp-sgd`"
            )
        return self

    @property
    def label(self) -> str:
        """The name in tables and figures of an evaluation."""
        return self.protocol

    @classmethod
    def compared(cls, parts: int, limits: Mapping[str, Any]) -> Iterable[Self]:
        """The settings that an evaluation compares at one budget; none of a reference or of one trained model.

        Args:
            parts: of the ensemble.
            limits: `epsilon`, `delta` and `tokens` of the budget.
        """
        return () if cls.one_model else (cls.model_validate(limits),)

    @classmethod
    def tuned(cls, parts: int, limits: Mapping[str, Any], shares: Sequence[float]) -> Iterable[Self]:
        """The settings among which `privmix tune` searches; arguments as of `compared`.

        Args:
            parts: of the ensemble.
            limits: `epsilon`, `delta` and `tokens` of the budget.
            shares: of the parts that may be drawn for a token.
        """
        return cls.compared(parts, limits)

    def varied(self, quantity: str, value: float, parts: int) -> Self | None:
        """These settings with another ``q`` (share of the parts drawn), ``order`` or ``radius``, for a sweep.

        None where the protocol has no such parameter.
        """
        return None
