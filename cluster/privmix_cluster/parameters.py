"""Reads a protocol's settings from command-line options: `--set sigma=20` means `privacy.sigma: 20` in the file."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

if TYPE_CHECKING:
    from privmix.privacy.settings import Settings

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="A value of a protocol's field; repeat for more."),
]


def assigned(option: str, text: str) -> tuple[str, str]:
    """Parses `name=value`. Raises `typer.BadParameter`, which names the option, for another form."""
    name, equals, value = text.partition("=")
    if not (name.strip() and equals and value.strip()):
        raise bad(option, f"must be FIELD=VALUE, such as q=0.1, got {text!r}")
    return name.strip().replace("-", "_"), value.strip()


def fields(given: Sequence[str] | None) -> dict[str, str]:
    """Returns the values of `--set` by their fields."""
    return dict(assigned("set", each) for each in given or ())


def settings_from(protocol: str, given: Mapping[str, object]) -> "Settings":
    """Returns the settings of a protocol.

    Raises:
        typer.BadParameter: the protocol or a parameter does not exist, or a value is invalid.
    """
    from privmix.privacy.protocols import PROTOCOLS  # slow to import
    from privmix.privacy.settings import Settings

    if protocol not in PROTOCOLS:
        raise bad("protocol", f"there is no protocol {protocol!r}; there are {', '.join(PROTOCOLS)}")
    try:
        return PROTOCOLS[protocol].model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        parameter = str(first["loc"][0]) if first["loc"] else protocol
        option = parameter if parameter in Settings.model_fields else f"set {parameter}"
        if first["type"] == "extra_forbidden":
            raise bad(option, f"{protocol} has no such field; `privmix protocols` lists its fields") from error
        raise bad(option, f"{first['msg']}, got {first['input']}") from error


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
