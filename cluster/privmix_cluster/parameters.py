"""Reads a protocol's settings from command-line options: `--sigma 20` means `privacy.sigma: 20` in the file."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer
from pydantic import ValidationError

if TYPE_CHECKING:
    from privmix.privacy.settings import Settings

ACCEPTED = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a command that accepts the options of protocols (see `settings_from`)."""


def options(arguments: Sequence[str]) -> dict[str, str]:
    """Parses `--name value` and `--name=value` into names and values.

    Raises:
        typer.BadParameter: an argument has another form.
    """
    given: dict[str, str] = {}
    remaining = list(arguments)
    while remaining:
        name, equals, value = remaining.pop(0).partition("=")
        if not name.startswith("--"):
            raise typer.BadParameter(f"{name!r} is not an option", param_hint="arguments")
        if not equals:
            if not remaining:
                raise bad(name[2:], "needs a value")
            value = remaining.pop(0)
        given[name[2:].replace("-", "_")] = value
    return given


def settings_from(protocol: str, given: Mapping[str, object]) -> "Settings":
    """Returns the settings of a protocol.

    Raises:
        typer.BadParameter: the protocol or a parameter does not exist, or a value is invalid.
    """
    from privmix.privacy.protocols import PROTOCOLS  # slow to import

    if protocol not in PROTOCOLS:
        raise bad("protocol", f"there is no protocol {protocol!r}; there are {', '.join(PROTOCOLS)}")
    try:
        return PROTOCOLS[protocol].model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        parameter = str(first["loc"][0]) if first["loc"] else protocol
        if first["type"] == "extra_forbidden":
            raise bad(
                parameter, f"{protocol} has no such parameter; `privmix protocols` lists its parameters"
            ) from error
        raise bad(parameter, f"{first['msg']}, got {first['input']}") from error


def bad(option: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=f"--{option.replace('_', '-')}")


def count(text: str) -> int:
    """Parses a whole number above 0, also in the forms `1e6` and `1_000_000`.

    Raises:
        typer.BadParameter: the text is not such a number.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number.is_integer() or number < 1:
        raise typer.BadParameter(f"must be a whole number above 0, such as 1000000 or 1e6, got {text!r}")
    return int(number)
