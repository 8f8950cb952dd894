"""Describes how an evaluation compares each protocol: its label, and its settings at one budget.

    for settings in of("pmixed").compared(parts, budget.limits()):
        print(label(settings))

A protocol without an entry in `COMPARISONS` has its name as its label, and the default settings at the budget.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from privmix.privacy.accounting import published
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.protocols.adapmixed import AdaPMixedSettings
from privmix.privacy.protocols.exponential import ExponentialSettings
from privmix.privacy.protocols.gnmax import GNMaxSettings
from privmix.privacy.protocols.pmixed import PMixedSettings
from privmix.privacy.protocols.submix import SubMixSettings
from privmix.privacy.settings import Settings

Limits = Mapping[str, Any]
"""`epsilon`, `delta` and `tokens` of a budget."""

PUBLISHED_DRAWN = 2.4
"""The average number of drawn parts in the paper: 80 parts with q = 0.03 (Flemings et al. 2024, section 6)."""

SAMPLES = (16, 4)
"""The numbers of parts that the exponential mechanism draws for a token, besides all."""

WHOLE_VOCABULARY = 2**31
"""A number of candidates that no vocabulary exceeds."""


@dataclass(frozen=True)
class ProtocolComparison:
    """Describes how one protocol is compared. All functions get settings of this protocol only.

    Attributes:
        label: names settings in tables and figures.
        distinct_label: the label that distinguishes settings from the others of `compared`; None if `label` does.
        compared: (parts, limits) to the settings of a table at one budget; none for references.
        drawing: (settings, rows) to settings with at most so many part rows for a token, or None if they need the rows
            of all parts.
    """

    label: Callable[[Any], str]
    compared: Callable[[int, Limits], Iterable[Settings]]
    distinct_label: Callable[[Any], str] | None = None
    drawing: Callable[[Any, int], Settings | None] = lambda settings, rows: None


def of(name: str) -> ProtocolComparison:
    """Returns how the protocol of this name is compared."""
    if name in COMPARISONS:
        return COMPARISONS[name]
    chosen = PROTOCOLS[name]
    return _reference(name) if chosen.one_model else ProtocolComparison(lambda _: name, _default(chosen))


def label(settings: Settings) -> str:
    """Returns the name of settings in tables and figures."""
    return of(settings.protocol).label(settings)


def distinct_label(settings: Settings) -> str:
    """Returns the label that distinguishes settings from the others of their protocol in a table."""
    comparison = of(settings.protocol)
    return (comparison.distinct_label or comparison.label)(settings)


def compared(name: str, parts: int, limits: Limits) -> Iterable[Settings]:
    """Returns the settings of a protocol that a table compares at one budget."""
    return of(name).compared(parts, limits)


def drawing(settings: Settings, rows: int) -> Settings:
    """Returns these settings with at most ``rows`` part rows for a token.

    Raises:
        ValueError: a token needs the rows of all parts.
    """
    drawn = of(settings.protocol).drawing(settings, rows)
    if drawn is None:
        raise ValueError(f"{settings.protocol} needs the rows of all parts; evaluate it without `drawn`")
    return drawn


def _default(chosen: type[Settings]) -> Callable[[int, Limits], Iterable[Settings]]:
    return lambda parts, limits: (chosen.model_validate(limits),)


def _reference(text: str) -> ProtocolComparison:
    """Returns the comparison of a reference or of a single model, which has rows of its own beside a table's."""
    return ProtocolComparison(lambda _: text, lambda parts, limits: ())


def _pmixed_label(settings: PMixedSettings) -> str:
    return "PMixed, as published" if settings.mollifier == "renyi" else f"PMixed, {settings.projection}"


def _pmixed(parts: int, limits: Limits) -> Iterator[PMixedSettings]:
    yield _published(limits, min(1.0, PUBLISHED_DRAWN / parts))
    yield PMixedSettings.model_validate(limits)
    yield PMixedSettings.model_validate({"projection": "mix", **limits})


def _published(limits: Limits, q: float) -> PMixedSettings:
    order = published.preferred_order(PMixedSettings().order, limits["epsilon"], limits["delta"])
    return PMixedSettings.model_validate({"mollifier": "renyi", "q": q, "order": order, **limits})


def _adapmixed_label(settings: AdaPMixedSettings) -> str:
    return "AdaPMixed, certified" if settings.mollifier == "ratio" else "AdaPMixed, as published"


def _adapmixed(parts: int, limits: Limits) -> Iterator[AdaPMixedSettings]:
    yield AdaPMixedSettings.model_validate({"mollifier": "renyi", **limits})
    yield AdaPMixedSettings.model_validate(limits)


def _submix(parts: int, limits: Limits) -> Iterator[SubMixSettings]:
    order = published.preferred_order(int(SubMixSettings().order), limits["epsilon"], limits["delta"])
    yield SubMixSettings.model_validate({"order": order, **limits})


def _gnmax(parts: int, limits: Limits) -> Iterator[GNMaxSettings]:
    """Yields GNMax over the whole vocabulary, as SubMix compares with it: a token that is no candidate costs all."""
    yield GNMaxSettings.model_validate({"candidates": WHOLE_VOCABULARY, **limits})


_EXPONENTIAL = "Exponential mechanism"


def _distinct_exponential_label(settings: ExponentialSettings) -> str:
    return _EXPONENTIAL if settings.sample is None else f"{_EXPONENTIAL}, m = {settings.sample}"


def _exponential(parts: int, limits: Limits) -> Iterator[ExponentialSettings]:
    for sample in (None, *(sample for sample in SAMPLES if sample < parts)):
        yield ExponentialSettings.model_validate({"sample": sample, **limits})


def _draw_exponential(settings: ExponentialSettings, rows: int) -> ExponentialSettings:
    return settings.model_copy(update={"sample": rows if settings.sample is None else min(rows, settings.sample)})


COMPARISONS: Mapping[str, ProtocolComparison] = {
    "pmixed": ProtocolComparison(
        _pmixed_label,
        _pmixed,
        drawing=lambda settings, rows: settings if settings.mollifier == "ratio" else None,
    ),
    "adapmixed": ProtocolComparison(_adapmixed_label, _adapmixed),
    "submix": ProtocolComparison(lambda _: "SubMix", _submix),
    "exponential": ProtocolComparison(
        lambda _: _EXPONENTIAL,
        _exponential,
        _distinct_exponential_label,
        _draw_exponential,
    ),
    "individual": ProtocolComparison(lambda _: "Individual budgets", _default(PROTOCOLS["individual"])),
    "gnmax": ProtocolComparison(lambda _: "GNMax", _gnmax),
    "subsample-aggregate": ProtocolComparison(
        lambda _: "Subsample and aggregate", _default(PROTOCOLS["subsample-aggregate"])
    ),
    "dp-sgd": _reference("DP-SGD"),
    "public": ProtocolComparison(
        lambda _: "Public model",
        lambda parts, limits: (),
        drawing=lambda settings, rows: settings,
    ),
    "finetuned": _reference("Fine-tuned, not private"),
    "ensemble": ProtocolComparison(
        lambda _: "Ensemble, not private", lambda parts, limits: (), drawing=lambda settings, rows: settings
    ),
}
