"""What is compared: the settings of every protocol at one budget, and sweeps over one quantity."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from services.evaluation.ensembles import private_training
from services.privacy.protocols import PROTOCOLS
from services.privacy.protocols.dp_sgd import DpSgdSettings
from services.privacy.protocols.ensemble import EnsembleSettings
from services.privacy.settings import Settings
from services.training.manifest import Manifest


class Budget(BaseModel):
    """What every private method of a table is given."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    tokens: int = Field(gt=0)

    def limits(self) -> dict[str, Any]:
        return self.model_dump()


def dp_sgd(budget: Budget, manifest: Manifest) -> Settings:
    """The settings of the model that DP-SGD trained, whose guarantee is that of its training.

    Raises:
        InputError: it was not trained so.
    """
    training = private_training(manifest)
    # No limit on tokens: what they cost was spent on training, whatever this table's budget.
    limits = {**budget.limits(), "epsilon": None, "delta": training.delta}
    return DpSgdSettings(**asdict(training.event), **limits)


def private(budget: Budget, parts: int, halves: bool) -> Iterator[Settings]:
    """The rows of a table at one budget; with ``halves`` also those that need models of half-parts."""
    for settings in PROTOCOLS.values():
        if halves or not settings.mechanism.halves:
            yield from settings.compared(parts, budget.limits())


def planned(budget: Budget, parts: int) -> Iterator[Settings]:
    """Those without noise, whose cost is known beforehand, so that what a longer life costs shows at any length."""
    return (each for each in private(budget, parts, halves=False) if not each.mechanism.noisy)


def of_size(budget: Budget, parts: int) -> Iterator[Settings]:
    """The points of the sweep over `parts` at one size of ensemble."""
    yield EnsembleSettings()
    yield from planned(budget, parts)


Quantity = Literal["epsilon", "tokens", "parts", "q", "order", "radius"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)


@dataclass(frozen=True)
class Point:
    """One value of what a sweep varies, of one of its lines."""

    value: float
    settings: Settings


@dataclass(frozen=True)
class Sweep:
    """Perplexity against one quantity, everything else as in the table. Points of one label make a line."""

    quantity: Quantity
    points: tuple[Point, ...]


EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
TOKENS = (64, 256, 1024, 4096, 16384)
SHARES = (0.0625, 0.125, 0.25, 0.5, 1.0)
ORDERS = (3, 4, 6, 8, 12, 16)
RADII = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


def sweeps(budget: Budget, parts: int, halves: bool) -> Iterator[Sweep]:
    """The sweeps within one ensemble. That over parts is made of several (`of_size`)."""
    epsilons = [budget.model_copy(update={"epsilon": epsilon}) for epsilon in EPSILONS]
    yield Sweep("epsilon", tuple(Point(each.epsilon, one) for each in epsilons for one in private(each, parts, halves)))
    lasting = [budget.model_copy(update={"tokens": tokens}) for tokens in TOKENS]
    yield Sweep("tokens", tuple(Point(each.tokens, one) for each in lasting for one in planned(each, parts)))
    without_noise = list(planned(budget, parts))
    yield _varied("q", [q for q in SHARES if q * parts >= 1], without_noise, parts)
    yield _varied("order", ORDERS, private(budget, parts, halves), parts)
    # Without a budget: what these cost is reported instead.
    yield _varied("radius", RADII, (each.model_copy(update={"epsilon": None}) for each in without_noise), parts)


@cache
def labels() -> tuple[str, ...]:
    """The label of every line that a figure may have."""
    budget = Budget(epsilon=8.0, delta=1e-5, tokens=1024)
    compared = [*private(budget, 16, halves=True), EnsembleSettings()]
    return tuple(dict.fromkeys(each.label for each in compared))


def _varied(quantity: Quantity, values: Iterable[float], compared: Iterable[Settings], parts: int) -> Sweep:
    compared = list(compared)
    points = ((value, each.varied(quantity, value, parts)) for value in values for each in compared)
    return Sweep(quantity, tuple(Point(value, each) for value, each in points if each is not None))
