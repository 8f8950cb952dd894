"""Lets a command take its options in groups, which several commands can share.

    @dataclass(frozen=True)
    class ModelOptions:
        model: Annotated[str | None, typer.Option(help="The public model.")] = None

    @grouped
    def train(corpus: CorpusArgument, chosen: ModelOptions) -> None:
        chosen.model    # what --model gave

The help lists the options of all groups.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command with the fields of each parameter that is a dataclass as parameters of its own."""
    parameters = signature(command, eval_str=True).parameters.values()
    annotations: dict[str, type[Any]] = {parameter.name: parameter.annotation for parameter in parameters}
    groups = {name: annotation for name, annotation in annotations.items() if is_dataclass(annotation)}

    def flat(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    options = [
        option
        for parameter in parameters
        for option in (_options(groups[parameter.name]) if parameter.name in groups else [parameter])
    ]
    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {option.name: option.annotation for option in options}
    flat.__signature__ = Signature([option.replace(kind=Parameter.KEYWORD_ONLY) for option in options])  # type: ignore[attr-defined]
    return flat


def _options(group: type[Any]) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if default is MISSING else default,
            annotation=hints[field.name],
        )
