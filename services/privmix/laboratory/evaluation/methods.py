"""Lists the settings to compare: those of every protocol at one budget, and sweeps over one quantity."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache

from privmix.laboratory.evaluation import comparisons
from privmix.laboratory.evaluation.comparisons import distinct_label, label
from privmix.laboratory.evaluation.options import Quantity
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.protocols.dp_sgd import DpSgdSettings
from privmix.privacy.protocols.ensemble import EnsembleSettings
from privmix.privacy.settings import Settings
from privmix.training.manifest import PrivateTraining
from privmix.training.options import TokenBudget


def dp_sgd(budget: TokenBudget, training: PrivateTraining) -> Settings:
    """Returns the settings of a model trained with DP-SGD, with the guarantee of its training."""
    # Tokens are unlimited, because the whole cost was spent on training, whatever this table's budget is.
    limits = {**budget.limits(), "epsilon": None, "delta": training.delta}
    return DpSgdSettings(**asdict(training.event), **limits)


def private(budget: TokenBudget, parts: int, halves: bool) -> Iterator[Settings]:
    """Yields the settings of a table at one budget; with ``halves`` also those that need models of half-parts."""
    for name, settings in PROTOCOLS.items():
        if halves or not settings.mechanism.halves:
            yield from comparisons.compared(name, parts, budget.limits())


def planned(budget: TokenBudget, parts: int) -> Iterator[Settings]:
    """Yields the settings without noise. Their cost is fixed in advance, so runs of any length show its effect."""
    return (settings for settings in private(budget, parts, halves=False) if not settings.mechanism.noisy)


@dataclass(frozen=True)
class Point:
    """Holds one point of a line of a sweep."""

    value: float
    settings: Settings


@dataclass(frozen=True)
class Sweep:
    """Varies one quantity; everything else is as in the table. Points with the same label form a line."""

    quantity: Quantity
    points: tuple[Point, ...]


EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
TOKENS = (64, 256, 1024, 4096, 16384)
FRACTIONS = (0.0625, 0.125, 0.25, 0.5, 1.0)
ORDERS = (3, 4, 6, 8, 12, 16)
RADII = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


def sweeps(budget: TokenBudget, parts: int, halves: bool) -> Iterator[Sweep]:
    yield Sweep(
        "epsilon",
        tuple(
            Point(epsilon, settings)
            for epsilon in EPSILONS
            for settings in private(budget.model_copy(update={"epsilon": epsilon}), parts, halves)
        ),
    )
    yield Sweep(
        "tokens",
        tuple(
            Point(tokens, settings)
            for tokens in TOKENS
            for settings in planned(budget.model_copy(update={"tokens": tokens}), parts)
        ),
    )
    without_noise = list(planned(budget, parts))
    one_each = (settings for settings in without_noise if distinct_label(settings) == label(settings))
    yield _varied("q", [q for q in FRACTIONS if q * parts >= 1], one_each, parts)
    yield _varied("order", ORDERS, private(budget, parts, halves), parts)
    # These have no budget; the figure shows their cost instead.
    unlimited = (settings.model_copy(update={"epsilon": None}) for settings in without_noise)
    yield _varied("radius", RADII, unlimited, parts)


@cache
def labels() -> tuple[str, ...]:
    """Returns the labels of all lines that a figure may contain."""
    budget = TokenBudget(epsilon=8.0, delta=1e-5, tokens=1024)
    compared = [*private(budget, 64, halves=True), EnsembleSettings()]
    return tuple(dict.fromkeys(map(distinct_label, compared)))


def _varied(quantity: Quantity, values: Iterable[float], compared: Iterable[Settings], parts: int) -> Sweep:
    compared = list(compared)
    points = (
        (value, comparisons.varied(settings, quantity, value, parts)) for value in values for settings in compared
    )
    return Sweep(quantity, tuple(Point(value, settings) for value, settings in points if settings is not None))
