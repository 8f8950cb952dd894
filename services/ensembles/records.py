"""The ensembles of a service as plain data. It is sent between actors and stored in the service's database."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from services.keys.messages import Room

State = Literal["serving", "draining"]


class EnsemblesError(Exception):
    """A change of the list of ensembles is refused. The message names the reason and the fix."""


class Ensemble(BaseModel):
    """What a gateway needs to know about one ensemble.

    Attributes:
        names: the model names that clients use; the first is the ensemble's own.
        namespace: Ray's, of its actors.
        model: a Hugging Face model directory, read for its tokenizer only.
        context_length: the engine's, in tokens.
        coordinators, budget, fleet: the names of its actors.
        capacity: generations that its coordinators advance together.
        max_waiting: generations that may wait behind them.
        own_shares: whether keys can have shares of this ensemble alone.
        recovery_s: for how long a request looks for a coordinator that takes it, or goes on with it, before it fails.
        stall_timeout_s: how long a request waits for its next token, losses and recoveries included.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    names: tuple[str, ...]
    namespace: str
    model: Path
    context_length: PositiveInt
    coordinators: tuple[str, ...] = ("coordinator",)
    budget: str = "budget"
    fleet: str = "fleet"
    capacity: PositiveInt = 64
    max_waiting: NonNegativeInt = 256
    own_shares: bool = False
    recovery_s: NonNegativeFloat = 90.0
    stall_timeout_s: PositiveFloat = 210.0

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def shares(self) -> str | None:
        """The name under which keys have shares of it alone."""
        return self.name if self.own_shares else None

    @property
    def room(self) -> Room:
        return Room(self.name, self.capacity, self.max_waiting, self.shares)


class Listed(BaseModel):
    """An ensemble and its state. A draining ensemble finishes its requests and accepts no new ones."""

    model_config = ConfigDict(frozen=True)

    ensemble: Ensemble
    state: State = "serving"


class View(BaseModel):
    """The list of ensembles at one moment. `version` changes with every change of the list."""

    model_config = ConfigDict(frozen=True)

    version: int
    listed: tuple[Listed, ...]


class Account(BaseModel):
    """The state of an ensemble, for operators.

    Attributes:
        live: requests for it that have not ended.
        known: whether every gateway knows its present state.
        drained: whether no gateway has, or will take, a request for it.
    """

    model_config = ConfigDict(frozen=True)

    ensemble: Ensemble
    state: State
    live: int
    known: bool
    drained: bool
