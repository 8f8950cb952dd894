"""Registers the methods: each with settings that were chosen in advance on public tables, and its guarantee."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from privmix.foundation.errors import InputError
from privmix.laboratory.heads import MethodName, certified, expm_nf, sgd
from privmix.laboratory.heads.certified import CertifiedSettings
from privmix.laboratory.heads.expm_nf import ExpMNFSettings, FitSettings
from privmix.laboratory.heads.flows import FlowSettings
from privmix.laboratory.heads.models import GRUD, LogisticRegression, Parametrised
from privmix.laboratory.heads.sgd import HeadDpSgdSettings, SgdSettings
from privmix.laboratory.heads.table import UNSTATED, Table
from privmix.privacy.events import Event, GuaranteeStatus
from privmix.privacy.protocols.dp_sgd import DpSgdEvent
from privmix.privacy.sampling.selection import SelectionEvent

DELTA = 1e-5
SAMPLES = 1000
"""The number of parameter vectors drawn from each fitted flow."""

SGD = SgdSettings()
DP_SGD = HeadDpSgdSettings()
EXPM_NF = ExpMNFSettings(flow=FlowSettings(sigma=0.01), fit=FitSettings(steps=300))
CERTIFIED = CertifiedSettings()


@dataclass(frozen=True)
class Method:
    """Describes one way to train a head.

    Attributes:
        label: the name in tables.
        status: the status of its guarantee.
        guarantee: the guarantee of a release, in words.
        train: maps a table, epsilon, the event and a seed to parameter vectors [S, D], each a separate release.
        event: the privacy event of one release at an epsilon; None if nothing is certified.
        delta: the delta of its guarantee.
        private: whether the method has an epsilon.
        ledger_share: the epsilon of a ledger with room for one release, divided by the method's. A ledger converts at
            one Rényi order, which yields more than the accountant that determined the noise.
        unfit: returns why the method cannot train on a table, and the fix; None if it can.
    """

    label: str
    status: GuaranteeStatus
    guarantee: str
    train: Callable[[Table, float, Event | None, int], Tensor]
    event: Callable[[Table, float], Event] | None = None
    delta: float = 0.0
    private: bool = True
    ledger_share: float = 1.0
    unfit: Callable[[Table], str | None] = lambda _: None

    def release(self, table: Table, epsilon: float, seed: int) -> Tensor:
        """Trains on a table; returns parameter vectors [S, D]."""
        event = None if self.event is None else self.event(table, epsilon)
        return self.train(table, epsilon, event, seed)


def built(table: Table, seed: int | None = None) -> Parametrised:
    """Returns the model of a table: GRU-D for time series, otherwise logistic regression; a seed fixes its weights."""
    if seed is not None:
        torch.manual_seed(seed)
    return Parametrised(GRUD(table.features) if table.series else LogisticRegression(table.features))


def _tensors(table: Table) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(table.x), torch.from_numpy(table.y)


def _train_sgd(table: Table, _: float, __: Event | None, seed: int) -> Tensor:
    return Parametrised(sgd.train(built(table, seed).module, *_tensors(table), SGD, seed)).vector[None]


def _dp_sgd_event(table: Table, epsilon: float) -> Event:
    return sgd.event_for(epsilon, DELTA, table.stated_population, DP_SGD)


def _train_dp_sgd(table: Table, _: float, event: Event | None, seed: int) -> Tensor:
    assert isinstance(event, DpSgdEvent)
    model, batch = built(table, seed).module, event.sampling_rate * table.stated_population
    return Parametrised(sgd.train_privately(model, *_tensors(table), event, batch, DP_SGD)).vector[None]


def _train_expm_nf(table: Table, epsilon: float, _: Event | None, seed: int) -> Tensor:
    flow = expm_nf.train(built(table, seed), *_tensors(table), epsilon, EXPM_NF, seed)
    return expm_nf.release(flow, SAMPLES, seed)


def _certified_event(table: Table, epsilon: float) -> Event:
    return certified.event(table, epsilon, CERTIFIED)


def _train_certified(table: Table, _: float, event: Event | None, seed: int) -> Tensor:
    assert isinstance(event, SelectionEvent)
    return certified.release(built(table, seed), table, event, CERTIFIED, seed=seed)[None]


def _not_for_dp_sgd(table: Table) -> str | None:
    if table.unit != "record":
        return "it hides single rows, and users have several; leave --user-field out"
    return UNSTATED if table.population is None else None


def _needs_public_scaling(table: Table) -> str | None:
    return None if table.scaling == "public" else certified.UNSCALED


METHODS: Mapping[MethodName, Method] = {
    "non-private": Method("Not private", "none", "none", _train_sgd, private=False),
    "dp-sgd": Method(
        "DP-SGD",
        "certified",
        f"(epsilon, {DELTA:g})-differential privacy, one row added or removed",
        _train_dp_sgd,
        _dp_sgd_event,
        DELTA,
        ledger_share=1.5,
        unfit=_not_for_dp_sgd,
    ),
    "expm-nf": Method("ExpM+NF, as published", "none", "none proven", _train_expm_nf),
    "expm-certified": Method(
        "ExpM over public candidates",
        "certified",
        "epsilon-differential privacy, delta 0, one user's rows replaced by any others",
        _train_certified,
        _certified_event,
        unfit=_needs_public_scaling,
    ),
}


def demand_certified(name: MethodName) -> None:
    """Raises `InputError` if the method has no proven guarantee."""
    if METHODS[name].status != "certified":
        proven = [other for other, method in METHODS.items() if method.status == "certified"]
        raise InputError(
            f"method: {name} has no proven guarantee ({METHODS[name].guarantee}); choose {' or '.join(proven)}"
        )


def guarantee(name: MethodName, table: Table) -> str:
    """Returns the guarantee of a method on a table, in words."""
    method = METHODS[name]
    if method.status == "certified" and table.scaling == "private":
        return f"{method.guarantee}, for given scales; the scales come from the rows, which it does not cover"
    return method.guarantee


def demand_fit(name: MethodName, table: Table) -> None:
    """Checks that a method can train on a table, and that its guarantee, if it is certified, covers the scaling.

    Raises:
        InputError: it cannot, or the guarantee does not.
    """
    method = METHODS[name]
    reason = method.unfit(table) or (_needs_public_scaling(table) if method.status == "certified" else None)
    if reason is not None:
        raise InputError(f"method {name}, table {table.name}: {reason}")
