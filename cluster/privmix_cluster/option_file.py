"""Reads the options of a command from a YAML file.

A key is an option's name without its dashes. The command line has precedence. Relative paths in the file are relative
to the file.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from privmix.foundation.errors import ConfigurationError

INSTEAD: Mapping[tuple[str | None, str], str] = {
    ("train", "dp-sgd"): "is no option; `privmix train-base` trains with DP-SGD and has the same options for it"
}
"""What to use instead of an option that a command does not have, by the command and the option."""


def use_options(context: typer.Context, file: Path | None) -> Path | None:
    """Takes the options that the command line does not give from `file`. It is the callback of an eager option.

    Raises:
        ConfigurationError: the file cannot be read or is not YAML, a key names no option, or its value has another
            form than the option's.
    """
    if file is not None:
        from privmix_cluster.configuration import read_yaml  # slow to import

        context.default_map = dict(_values(context, read_yaml(file), file))
    return file


def _values(context: typer.Context, given: Mapping[str, Any], file: Path) -> Iterator[tuple[str, Any]]:
    """Yields the values by the names of the command's parameters, in the forms that the command line gives them."""
    options: dict[str, Any] = {
        option.opts[0].removeprefix("--"): option
        for option in context.command.params
        if option.param_type_name == "option" and not option.is_eager
    }
    for key, value in given.items():
        name = str(key).replace("_", "-")
        if name not in options:
            if instead := INSTEAD.get((context.info_name, name)):
                raise ConfigurationError(f"{file}: {key}: {instead}")
            near = get_close_matches(name, options, 1)
            hint = f"did you mean {near[0]}?" if near else "remove it, or correct its name"
            raise ConfigurationError(f"{file}: {key}: there is no such option; {hint}")
        option = options[name]
        try:
            yield option.name, _value(option, value, file.parent)
        except TypeError as error:
            raise ConfigurationError(f"{file}: {key}: {error}, got {value!r}") from error


def _value(option: Any, value: Any, folder: Path) -> Any:
    """Returns a value as text, so that it is read like one of the command line.

    Raises:
        TypeError: the value has another form than the option's.
    """
    if option.is_flag:
        if not isinstance(value, bool):
            raise TypeError("must be true or false")
        return value
    if option.multiple:
        if not isinstance(value, list):
            raise TypeError("must be a list")
        return [_text(option, each, folder) for each in value]
    return _text(option, value, folder)


def _text(option: Any, value: Any, folder: Path) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError("must be a text or a number")
    text = str(value)
    if option.type_descriptor.annotation in (Path, list[Path]) or (
        option.name in _DIRECTORIES and (folder / text).is_dir()
    ):
        return str((folder / text).absolute())
    return text


_DIRECTORIES = ("base", "model")
"""Options whose value is a directory or another name."""
