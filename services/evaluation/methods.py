"""What is compared: the papers' protocols at one budget, and the sweeps of their ablation figures."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from services.evaluation.ensembles import private_training
from services.privacy.accounting import published
from services.privacy.protocols.adapmixed import AdaPMixedSettings
from services.privacy.protocols.dp_sgd import DpSgdSettings
from services.privacy.protocols.ensemble import EnsembleSettings
from services.privacy.protocols.exponential import ExponentialSettings
from services.privacy.protocols.finetuned import FinetunedSettings
from services.privacy.protocols.gnmax import GNMaxSettings
from services.privacy.protocols.pmixed import PMixedSettings
from services.privacy.protocols.public import PublicSettings
from services.privacy.protocols.submix import SubMixSettings
from services.privacy.protocols.subsample_aggregate import SubsampleAggregateSettings
from services.privacy.settings import Settings
from services.training.manifest import Manifest

_ORDERS = range(2, 65)
# How many parts the published method draws for a token on average: 80 with q = 0.03 (Flemings et al. 2024, section 6).
_PUBLISHED_DRAWN = 2.4


class Budget(BaseModel):
    """What every private method of a table is given."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    tokens: int = Field(gt=0)

    def limits(self) -> dict[str, Any]:
        return self.model_dump()


@dataclass(frozen=True)
class Method:
    """A protocol with its parameters, and the name it has in tables and figures."""

    label: str
    settings: Settings


def public() -> Method:
    return Method("Public model", PublicSettings())


def finetuned() -> Method:
    return Method("Fine-tuned, not private", FinetunedSettings())


def ensemble() -> Method:
    return Method("Ensemble, not private", EnsembleSettings())


def dp_sgd(budget: Budget, manifest: Manifest) -> Method:
    """The model that DP-SGD trained, whose guarantee is that of its training.

    Raises:
        InputError: it was not trained so.
    """
    training = private_training(manifest)
    # No limit on tokens: what they cost was spent on training, whatever this table's budget.
    limits = {**budget.limits(), "epsilon": None, "delta": training.delta}
    return Method("DP-SGD", DpSgdSettings(**asdict(training.event), **limits))


def private(budget: Budget, parts: int, halves: bool) -> Iterator[Method]:
    """The rows of a table at one budget. SubMix needs models of half-parts."""
    limits = budget.limits()
    yield pmixed_published(budget, parts)
    yield Method("PMixed, clip", PMixedSettings(**limits))
    yield Method("PMixed, mix", PMixedSettings(projection="mix", **limits))
    yield Method("AdaPMixed, as published", AdaPMixedSettings(mollifier="renyi", **limits))
    yield Method("AdaPMixed, certified", AdaPMixedSettings(**limits))
    if halves:
        yield submix(budget)
    yield Method("Exponential mechanism", ExponentialSettings(**limits))
    yield Method("GNMax", GNMaxSettings(**limits))
    yield Method("Subsample and aggregate", SubsampleAggregateSettings(**limits))


def pmixed_published(budget: Budget, parts: int, q: float | None = None, order: int | None = None) -> Method:
    q = min(1.0, _PUBLISHED_DRAWN / parts) if q is None else q
    order = int(_order(budget, 3)) if order is None else order
    settings = PMixedSettings(mollifier="renyi", q=q, order=order, **budget.limits())
    return Method("PMixed, as published", settings)


def submix(budget: Budget, order: float | None = None) -> Method:
    order = _order(budget, 4) if order is None else order
    return Method("SubMix", SubMixSettings(order=order, **budget.limits()))


def _order(budget: Budget, preferred: int) -> float:
    """The preferred order where it leaves anything of the budget, else that which leaves most for its order."""
    return float(preferred if _left(budget, preferred) > 0 else max(_ORDERS, key=lambda order: _left(budget, order)))


def _left(budget: Budget, order: int) -> float:
    try:
        return published.total_loss(order, budget.epsilon, budget.delta) / order
    except ValueError:
        return 0.0


Quantity = Literal["epsilon", "tokens", "parts", "q", "order", "radius"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)


@dataclass(frozen=True)
class Point:
    """One value of what a sweep varies, of one of its lines."""

    value: float
    method: Method


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
    """Those within one ensemble. That over parts is made of several (`over_parts`)."""
    epsilons = [budget.model_copy(update={"epsilon": epsilon}) for epsilon in EPSILONS]
    yield Sweep("epsilon", tuple(Point(each.epsilon, one) for each in epsilons for one in private(each, parts, halves)))
    lasting = [budget.model_copy(update={"tokens": tokens}) for tokens in TOKENS]
    yield Sweep("tokens", tuple(Point(each.tokens, one) for each in lasting for one in planned(each, parts)))
    yield Sweep("q", tuple(Point(q, one) for q in SHARES if q * parts >= 1 for one in drawing(budget, parts, q)))
    yield Sweep("order", tuple(Point(order, one) for order in ORDERS for one in at_order(budget, parts, order, halves)))
    yield Sweep("radius", tuple(Point(radius, one) for radius in RADII for one in within(budget, radius)))


def drawn(budget: Budget, parts: int, halves: bool) -> Sequence[Method]:
    """Methods whose perplexity is finite, and of two that are nearly the same the one that says more."""
    return (
        *planned(budget, parts),
        Method("AdaPMixed, as published", AdaPMixedSettings(mollifier="renyi", **budget.limits())),
        *([submix(budget)] if halves else []),
    )


def planned(budget: Budget, parts: int) -> Sequence[Method]:
    """Methods whose cost is known beforehand, so that what a longer life costs shows at any length."""
    limits = budget.limits()
    return (
        pmixed_published(budget, parts),
        Method("PMixed, clip", PMixedSettings(**limits)),
        Method("PMixed, mix", PMixedSettings(projection="mix", **limits)),
        Method("Exponential mechanism", ExponentialSettings(**limits)),
    )


def of_size(budget: Budget, parts: int) -> Sequence[Method]:
    return (ensemble(), *planned(budget, parts))


def drawing(budget: Budget, parts: int, q: float) -> Sequence[Method]:
    """The share ``q`` of the parts for a token: drawn with this probability, or, in a fixed number, nearest to it."""
    limits = budget.limits()
    return (
        pmixed_published(budget, parts, q),
        Method("PMixed, clip", PMixedSettings(q=q, **limits)),
        Method("PMixed, mix", PMixedSettings(q=q, projection="mix", **limits)),
        Method("Exponential mechanism", ExponentialSettings(sample=max(1, round(q * parts)), **limits)),
    )


def at_order(budget: Budget, parts: int, order: int, halves: bool) -> Sequence[Method]:
    adaptive = AdaPMixedSettings(mollifier="renyi", order=order, **budget.limits())
    return (
        pmixed_published(budget, parts, order=order),
        Method("AdaPMixed, as published", adaptive),
        *([submix(budget, order)] if halves else []),
    )


def within(budget: Budget, radius: float) -> Sequence[Method]:
    """Without a budget: what these cost is reported instead."""
    limits = {**budget.limits(), "epsilon": None, "radius": radius}
    return (
        Method("PMixed, clip", PMixedSettings(**limits)),
        Method("PMixed, mix", PMixedSettings(projection="mix", **limits)),
        Method("Exponential mechanism", ExponentialSettings(**limits)),
    )
