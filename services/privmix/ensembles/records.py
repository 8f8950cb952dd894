"""Describes the ensembles of a service as plain data, which actors exchange and the service's database stores."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from privmix.keys.messages import AdmissionLimits

State = Literal["serving", "draining"]


class ServedEnsemble(BaseModel):
    """Describes an ensemble to gateways.

    Attributes:
        names: the model names that clients use; the first is the ensemble's own name.
        namespace: the Ray namespace of its actors.
        model: a Hugging Face model directory, read for its tokenizer only.
        context_length: the context length of its engines in tokens.
        coordinators, budget, fleet: the Ray names of its actors.
        capacity: the number of generations that its coordinators run at the same time.
        max_waiting: the number of further generations that may wait.
        recovery_s: how long a request without a coordinator waits for one before it fails.
        stall_timeout_s: how long a request waits for its next token, including failures and recoveries.
        own_shares: whether keys can have shares that apply to this ensemble alone.
        private_base: whether its base model was trained on private text, which answers are labelled with.
        cohort: a model name that it shares with ensembles of other users; None if it shares none.
        ensemble: its id in its manifest, if it is in a cohort: another one under its name may share users with the
            rest. None without a cohort, so that earlier versions can read the list, and in their lists.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    names: tuple[str, ...]
    namespace: str
    model: Path
    context_length: PositiveInt
    coordinators: tuple[str, ...]
    budget: str
    fleet: str
    capacity: PositiveInt
    max_waiting: NonNegativeInt
    recovery_s: NonNegativeFloat
    stall_timeout_s: PositiveFloat
    own_shares: bool = False
    private_base: bool = False
    cohort: str | None = None
    ensemble: str | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def shares(self) -> str | None:
        """The name under which keys have shares of this ensemble alone; None if they cannot."""
        return self.name if self.own_shares else None

    @property
    def admission_limits(self) -> AdmissionLimits:
        return AdmissionLimits(self.name, self.capacity, self.max_waiting, self.shares)


class EnsembleEntry(BaseModel):
    """Holds an ensemble and its state. A draining ensemble finishes its requests and accepts no new ones."""

    model_config = ConfigDict(frozen=True)

    ensemble: ServedEnsemble
    state: State = "serving"


class EnsembleList(BaseModel):
    """Holds the list of ensembles at one moment. `version` increases with every change of the list."""

    model_config = ConfigDict(frozen=True)

    version: int
    entries: tuple[EnsembleEntry, ...]


class EnsembleStatus(BaseModel):
    """Reports the state of an ensemble to operators.

    Attributes:
        live: the number of its requests that have not ended.
        known: whether every gateway knows its current state.
        drained: whether no gateway has a request for it or will accept one.
    """

    model_config = ConfigDict(frozen=True)

    ensemble: ServedEnsemble
    state: State
    live: int
    known: bool
    drained: bool
