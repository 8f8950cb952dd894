"""Lists the settings to compare: those of every protocol at one budget, with chosen values of their fields."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from pydantic import ValidationError

from privmix.foundation.errors import InputError
from privmix.laboratory.evaluation import comparisons
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.protocols.dp_sgd import DpSgdSettings
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


def with_fields(
    compared: Sequence[Settings], given: Mapping[str, str], swept: str | None = None
) -> Iterator[tuple[Settings, str]]:
    """Yields settings with the given values of their fields, and the label of each in tables and the plot.

    Settings without a field keep theirs, and are left out if the field is `swept`. Along a number, the label names the
    settings before the sweep, so that a line has one name.
    """
    for settings in compared:
        fixed = settings
        for name, value in given.items():
            if name != swept:
                fixed = _taking(fixed, name, value) or fixed
        if swept is None or swept not in given:
            yield fixed, comparisons.distinct_label(fixed)
            continue
        varied = _taking(fixed, swept, given[swept])
        if varied is not None:
            yield varied, comparisons.distinct_label(fixed if number(given[swept]) is not None else varied)


def number(text: str | None) -> float | None:
    """Returns the number that a value of a sweep is; None if it is none."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _taking(settings: Settings, name: str, value: str) -> Settings | None:
    """Returns settings with another value of a field; None if they have no such field, or do not take the value."""
    try:
        return _changed(settings, name, value)
    except ValidationError:
        return None


def _changed(settings: Settings, name: str, value: str) -> Settings:
    own: Mapping[str, object] = {name: None if value == "none" else value}
    return type(settings).model_validate({**settings.model_dump(exclude_unset=True), **own})


def check_taken(compared: Sequence[Settings], name: str, value: str) -> None:
    """Raises `InputError` that names the field if none of the settings take this value of it."""
    having = [settings for settings in compared if name in type(settings).model_fields and name != "protocol"]
    if not having:
        fields = {own for settings in compared for own in type(settings).model_fields} - {"protocol"}
        raise InputError(f"{name}: no protocol here has such a field; they have {', '.join(sorted(fields)) or 'none'}")
    problems = []
    for settings in having:
        try:
            _changed(settings, name, value)
        except ValidationError as error:
            problems.append(f"{name}: {settings.protocol} does not take {value!r}: {error.errors()[0]['msg']}")
        else:
            return
    raise InputError(problems[0])
