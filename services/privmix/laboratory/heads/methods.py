"""Registers the methods: each with a setting chosen in advance and its guarantee."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from privmix.foundation.errors import InputError
from privmix.laboratory.heads import certified, expm_nf, sgd
from privmix.laboratory.heads.certified import CertifiedSettings
from privmix.laboratory.heads.expm_nf import ExpMNFSettings, FitSettings
from privmix.laboratory.heads.flows import FlowSettings
from privmix.laboratory.heads.models import GRUD, LogisticRegression, Parametrised
from privmix.laboratory.heads.names import MethodName
from privmix.laboratory.heads.sgd import HeadDpSgdSettings, Noise, SgdSettings
from privmix.laboratory.heads.table import UNSTATED, Scaling, Table
from privmix.privacy.events import GuaranteeStatus

DELTA = 1e-5
SAMPLES = 1000
"""The number of parameter vectors drawn from each fitted flow."""

# The settings that each private method uses without a search. They were chosen on public tables.
DP_SGD = HeadDpSgdSettings()
EXPM_NF = ExpMNFSettings(flow=FlowSettings(sigma=0.01), fit=FitSettings(steps=300))
CERTIFIED = CertifiedSettings()


@dataclass(frozen=True)
class Method:
    """Describes one way to train a head.

    Attributes:
        name: the name in commands and results.
        label: the name in reports.
        private: whether the method has an epsilon.
        status: the status of its guarantee.
        guarantee: the guarantee of a release, in words.
        advance: the setting chosen in advance.
        train: maps model, table, epsilon, settings and seed to parameter vectors [S, D], each a separate release.
        delta: the delta of its guarantee.
        unfit: returns why the method cannot train on a table, and the fix; None if it can.
    """

    name: MethodName
    label: str
    private: bool
    status: GuaranteeStatus
    guarantee: str
    advance: BaseModel
    train: Callable[[Callable[[], nn.Module], Table, float, Any, int], Tensor]
    delta: float = 0.0
    unfit: Callable[[Table], str | None] = lambda _: None


def build(table: Table) -> Callable[[], nn.Module]:
    """Returns a constructor of the table's model: GRU-D for time series, otherwise logistic regression."""
    features, series = table.features, table.series
    return lambda: GRUD(features) if series else LogisticRegression(features)


def parametrised(table: Table) -> Parametrised:
    """Returns the model of a table as a function of its parameters."""
    return Parametrised(build(table)())


def _tensors(table: Table) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(table.x), torch.from_numpy(table.y)


def _train_sgd(make: Callable[[], nn.Module], table: Table, _: float, settings: SgdSettings, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return Parametrised(sgd.train(make(), *_tensors(table), settings, seed)).vector[None]


def _train_dp_sgd(
    make: Callable[[], nn.Module], table: Table, epsilon: float, settings: HeadDpSgdSettings, seed: int
) -> Tensor:
    torch.manual_seed(seed)  # the initial weights
    noise = sgd.noise_for(epsilon, DELTA, table.stated_population, settings.batch, settings.epochs)
    return train_with_noise(make, table, noise, settings)[None]


def train_with_noise(make: Callable[[], nn.Module], table: Table, noise: Noise, settings: HeadDpSgdSettings) -> Tensor:
    """Trains parameters [D] with DP-SGD."""
    return Parametrised(sgd.train_privately(make(), *_tensors(table), noise, settings)).vector


def _train_expm_nf(
    make: Callable[[], nn.Module], table: Table, epsilon: float, settings: ExpMNFSettings, seed: int
) -> Tensor:
    fitted = expm_nf.train(Parametrised(make()), *_tensors(table), epsilon, settings, seed)
    return expm_nf.release(fitted, SAMPLES, seed).values


def _train_certified(
    make: Callable[[], nn.Module], table: Table, epsilon: float, settings: CertifiedSettings, seed: int
) -> Tensor:
    event = certified.event(table, epsilon, settings)
    return certified.release(Parametrised(make()), table, event, settings, seed=seed)[None]


def _hides_rows(table: Table) -> str | None:
    if table.unit != "record":
        return "it hides single rows, and users have several; leave --user-field out"
    return _needs_population(table)


def _needs_population(table: Table) -> str | None:
    return UNSTATED if table.population is None else None


def _needs_public_scaling(table: Table) -> str | None:
    return None if table.scaling == "public" else certified.UNSCALED


METHODS: Mapping[MethodName, Method] = {
    method.name: method
    for method in (
        Method(
            "non-private",
            "Not private, cross-entropy",
            False,
            "none",
            "none",
            SgdSettings(),
            _train_sgd,
        ),
        Method(
            "non-private-l2",
            "Not private, l2",
            False,
            "none",
            "none",
            SgdSettings(loss="l2"),
            _train_sgd,
        ),
        Method(
            "dp-sgd",
            "DP-SGD",
            True,
            "certified",
            f"(epsilon, {DELTA:g})-differential privacy, one row added or removed",
            DP_SGD,
            _train_dp_sgd,
            DELTA,
            _hides_rows,
        ),
        Method(
            "expm-nf",
            "ExpM+NF, as published",
            True,
            "none",
            expm_nf.GUARANTEE,
            EXPM_NF,
            _train_expm_nf,
        ),
        Method(
            "expm-certified",
            "ExpM over public candidates",
            True,
            "certified",
            "epsilon-differential privacy, delta 0, one user's rows replaced by any others",
            CERTIFIED,
            _train_certified,
            0.0,
            _needs_public_scaling,
        ),
    )
}


def certified_methods() -> list[MethodName]:
    """Returns the methods with a proven guarantee."""
    return [name for name, method in METHODS.items() if method.status == "certified"]


def demand_certified(name: MethodName) -> Method:
    """Returns the method with this name.

    Raises:
        InputError: the method has no proven guarantee.
    """
    method = METHODS[name]
    if method.status != "certified":
        raise InputError(
            f"method: {name} has no proven guarantee ({method.guarantee}); choose {' or '.join(certified_methods())}"
        )
    return method


def guarantee(name: MethodName, table_scaling: Scaling) -> str:
    """Returns the guarantee of a method on a table, in words."""
    method = METHODS[name]
    if method.status == "certified" and table_scaling == "private":
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
