"""Reads settings that may hold a secret from files, such as those of a mounted Secret.

`budget.ledger_file`, or the variable PRIVMIX_BUDGET__LEDGER_FILE, names a file with the value of `budget.ledger`. The
same holds for all `SECRETS`. A variable is inherited by every child of a process, and a file is not.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from privmix.foundation.errors import ConfigurationError

SECRETS = (
    "budget.ledger",
    "budget.signing_key",
    "http.api_keys",
    "keys.database",
)
"""The settings that may hold a secret: a key, or a URL with a password. Messages do not show their values."""

SUFFIX = "_file"
MAX_BYTES = 1 << 16
_LISTS = ("http.api_keys",)


def read_files(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns settings with the values of files in the places of their names. Relative paths start at `folder`.

    A list is one value a line, or JSON. Space around a value does not count.

    Raises:
        ConfigurationError: a file cannot be used, or a setting has a value besides its file.
    """
    read = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    for place in SECRETS:
        section, setting = place.split(".")
        given = read.get(section)
        if isinstance(given, dict) and (file := given.pop(setting + SUFFIX, None)) is not None:
            if given.get(setting):
                raise ConfigurationError(f"{place}: give it or {place}{SUFFIX}, not both")
            text = text_of(folder / str(file), place + SUFFIX)
            given[setting] = _listed(text, place + SUFFIX) if place in _LISTS else text
    return read


def variable(name: str) -> str | None:
    """Returns the value of a variable, or that in the file which the variable `NAME_FILE` names; None without both.

    Raises:
        ConfigurationError: both are set, or the file cannot be used.
    """
    value, file = os.environ.get(name), os.environ.get(name + SUFFIX.upper())
    if value and file:
        raise ConfigurationError(f"{name}: set it or {name}{SUFFIX.upper()}, not both")
    return text_of(Path(file), name + SUFFIX.upper()) if file else value or None


def text_of(file: Path, name: str) -> str:
    """Returns the text of a file, which the setting or the option `name` names, without space around it.

    Raises:
        ConfigurationError: the file cannot be read, or has no text or too much of it.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigurationError(f"{name}: {file} has more than {MAX_BYTES} bytes; name a file with the value")
        text = content.decode().strip()
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not UTF-8"  # its message shows the value
        raise ConfigurationError(f"{name}: {file} cannot be read as text: {problem}") from None
    if not text or "\0" in text:
        raise ConfigurationError(f"{name}: {file} has no text; write the value into it")
    return text


def is_secret(key: str) -> bool:
    """Returns whether a dotted key, such as `http.api_keys.0`, is one of `SECRETS`, is inside of one, or has one."""
    return any(f"{key}.".startswith(f"{secret}.") or secret.startswith(f"{key}.") for secret in SECRETS)


def _listed(text: str, name: str) -> list[str]:
    if not text.startswith("["):
        return [line for line in map(str.strip, text.splitlines()) if line]
    try:
        listed: list[str] = json.loads(text)
    except ValueError:
        raise ConfigurationError(f"{name}: the file is not a JSON list; write one value a line") from None
    return listed
