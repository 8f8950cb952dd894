"""Lists the settings that an evaluation or an attack compares, and names them in tables.

A protocol that is not named here has its name as its label, and its default settings at the budget.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from privmix.foundation.errors import InputError
from privmix.laboratory.evaluation.options import ComparisonOptions
from privmix.privacy.accounting import published
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.protocols.adapmixed import AdaPMixedSettings
from privmix.privacy.protocols.dp_sgd import DpSgdSettings
from privmix.privacy.protocols.exponential import ExponentialSettings
from privmix.privacy.protocols.pmixed import PMixedSettings
from privmix.privacy.protocols.submix import SubMixSettings
from privmix.privacy.settings import Settings
from privmix.training.manifest import PrivateTraining
from privmix.training.options import TokenBudget

PUBLISHED_DRAWN = 2.4
"""The average number of drawn parts in the paper: 80 parts with q = 0.03 (Flemings et al. 2024, section 6)."""

SAMPLES = (16, 4)
"""The numbers of parts that the exponential mechanism draws for a token, besides all."""

WHOLE_VOCABULARY = 2**31
"""A number of candidates that no vocabulary exceeds."""

_LABELS = {
    "submix": "SubMix",
    "individual": "Individual budgets",
    "gnmax": "GNMax",
    "subsample-aggregate": "Subsample and aggregate",
    "dp-sgd": "DP-SGD",
    "public": "Public model",
    "finetuned": "Fine-tuned, not private",
    "ensemble": "Ensemble, not private",
}


def label(settings: Settings) -> str:
    """Returns the name of settings in tables and plots."""
    match settings:
        case PMixedSettings():
            return "PMixed, as published" if settings.mollifier == "renyi" else f"PMixed, {settings.projection}"
        case AdaPMixedSettings():
            return f"AdaPMixed, {'certified' if settings.mollifier == 'ratio' else 'as published'}"
        case ExponentialSettings():
            return "Exponential mechanism" + ("" if settings.sample is None else f", m = {settings.sample}")
        case _:
            return _LABELS.get(settings.protocol, settings.protocol)


def compared(name: str, parts: int, budget: TokenBudget) -> list[Settings]:
    """Returns the settings of a protocol that a table compares at one budget; none for references."""
    chosen, limits = PROTOCOLS[name], budget.model_dump()
    match name:
        case _ if chosen.one_model or name in ("public", "ensemble"):
            own: list[dict[str, Any]] = []
        case "pmixed":
            order = published.preferred_order(PMixedSettings().order, budget.epsilon, budget.delta)
            as_published = {"mollifier": "renyi", "q": min(1.0, PUBLISHED_DRAWN / parts), "order": order}
            own = [as_published, {}, {"projection": "mix"}]
        case "adapmixed":
            own = [{"mollifier": "renyi"}, {}]
        case "submix":
            own = [{"order": published.preferred_order(int(SubMixSettings().order), budget.epsilon, budget.delta)}]
        case "gnmax":  # as SubMix compares with it: a token that is no candidate costs all
            own = [{"candidates": WHOLE_VOCABULARY}]
        case "exponential":
            own = [{"sample": sample} for sample in (None, *(sample for sample in SAMPLES if sample < parts))]
        case _:
            own = [{}]
    return [chosen.model_validate({**each, **limits}) for each in own]


def dp_sgd(budget: TokenBudget, training: PrivateTraining) -> Settings:
    """Returns the settings of a model trained with DP-SGD, with the guarantee of its training."""
    # Tokens are unlimited, because the whole cost was spent on training, whatever this table's budget is.
    limits = {**budget.model_dump(), "epsilon": None, "delta": training.delta}
    return DpSgdSettings(**limits).for_training(training)


def private(budget: TokenBudget, parts: int, halves: bool) -> Iterator[Settings]:
    """Yields the settings of a table at one budget; with ``halves`` also those that need models of half-parts."""
    for name, chosen in PROTOCOLS.items():
        if halves or not chosen.mechanism.halves:
            yield from compared(name, parts, budget)


def chosen(
    options: ComparisonOptions, value: str | None, parts: int, halves: bool, *, check: bool = True
) -> list[tuple[str, Settings]]:
    """Returns the chosen settings at one value of the sweep, each with its label.

    Args:
        check: refuse a field that none of the settings takes.

    Raises:
        InputError: the budget or a value of a field is invalid.
    """
    included = [each for each in private(options.budget(value), parts, halves) if options.include(each)]
    given = options.given(value)
    if check:
        for name, own in given.items():
            check_taken(included, name, own)
    return list(with_fields(included, given, options.sweep))


def with_fields(
    compared: Sequence[Settings], given: Mapping[str, str], swept: str | None = None
) -> Iterator[tuple[str, Settings]]:
    """Yields settings with the given values of their fields, after the label of each in tables and the plot.

    Settings without a field keep theirs, and are left out if the field is `swept`. Along a number, the label names the
    settings before the sweep, so that a line has one name.
    """
    for settings in compared:
        fixed = settings
        for name, value in given.items():
            if name != swept:
                fixed = _taking(fixed, name, value) or fixed
        if swept is None or swept not in given:
            yield label(fixed), fixed
        elif (varied := _taking(fixed, swept, given[swept])) is not None:
            yield label(fixed if number(given[swept]) is not None else varied), varied


def number(text: str | None) -> float | None:
    """Returns the number that a value of a sweep is; None if it is none."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def check_taken(compared: Sequence[Settings], name: str, value: str) -> None:
    """Raises `InputError` that names the field if none of the settings take this value of it."""
    having = [settings for settings in compared if name in type(settings).model_fields and name != "protocol"]
    if not having:
        fields = {own for settings in compared for own in type(settings).model_fields} - {"protocol"}
        raise InputError(f"{name}: no protocol here has such a field; they have {', '.join(sorted(fields)) or 'none'}")
    if all(_taking(settings, name, value) is None for settings in having):
        try:
            _changed(having[0], name, value)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise InputError(f"{name}: {having[0].protocol} does not take {value!r}: {problem}") from error


def _taking(settings: Settings, name: str, value: str) -> Settings | None:
    """Returns settings with another value of a field; None if they have no such field, or do not take the value."""
    try:
        return _changed(settings, name, value)
    except ValidationError:
        return None


def _changed(settings: Settings, name: str, value: str) -> Settings:
    own: Mapping[str, object] = {name: None if value == "none" else value}
    return type(settings).model_validate({**settings.model_dump(exclude_unset=True), **own})
