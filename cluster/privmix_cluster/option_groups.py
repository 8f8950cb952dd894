"""Lets a command take its options in groups, which several commands can share.

    @dataclass(frozen=True)
    class ModelOptions:
        model: Annotated[str | None, typer.Option(help="The public model.")] = None

    @grouped
    def train(corpus: CorpusArgument, chosen: ModelOptions) -> None:
        chosen.model    # what --model gave

A group can also be the fields of a pydantic model, whose values, descriptions and checks the model alone has:

    @grouped
    def train(recipe: Annotated[Given, FieldsOf(TrainingOptions(), {"LoRA": ("rank", "alpha")})]) -> None:
        TrainingOptions.checked(**recipe)    # what --rank and --alpha gave

The help lists the options of all groups.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args, get_type_hints

import typer

from privmix.foundation.options import Options

Given = dict[str, Any]
"""The fields of a model that the command line sets."""


@dataclass(frozen=True)
class FieldsOf:
    """Makes options of the fields of a model.

    Attributes:
        defaults: the values that the help shows.
        panels: the fields by the panel of the help that lists them.
    """

    defaults: Options
    panels: Mapping[str, Sequence[str]]

    def options(self) -> Iterator[Parameter]:
        for panel, names in self.panels.items():
            for name in names:
                field = type(self.defaults).model_fields[name]
                kinds = get_args(field.annotation) or (field.annotation,)
                kind = next((kind for kind in (int, float) if kind in kinds), str)
                option = typer.Option(help=f"{field.description} Default: {self._shown(name)}.", rich_help_panel=panel)
                yield Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])

    def _shown(self, name: str) -> str:
        match getattr(self.defaults, name):
            case None:
                return str(type(self.defaults).model_fields[name].json_schema_extra["if_none"])  # type: ignore[index]
            case tuple() as names:
                return ",".join(names)
            case float() as number:
                return f"{number:g}"
            case value:
                return str(value)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command with the options of each group as parameters of its own."""
    parameters = signature(command, eval_str=True).parameters.values()
    groups = {parameter.name: found for parameter in parameters if (found := _group(parameter.annotation)) is not None}
    members = {name: list(_options(group)) for name, group in groups.items()}

    def flat(**given: Any) -> None:
        made = {}
        for name, group in groups.items():
            values = {option.name: given.pop(option.name) for option in members[name]}
            is_model = isinstance(group, FieldsOf)
            made[name] = {n: v for n, v in values.items() if v is not None} if is_model else group(**values)
        command(**given, **made)

    options = [option for parameter in parameters for option in members.get(parameter.name, [parameter])]
    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {option.name: option.annotation for option in options}
    flat.__signature__ = Signature([option.replace(kind=Parameter.KEYWORD_ONLY) for option in options])  # type: ignore[attr-defined]
    return flat


def _group(annotation: Any) -> Any:
    """Returns the dataclass or the `FieldsOf` of a parameter that is a group; None for an option."""
    if is_dataclass(annotation):
        return annotation
    return next((one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, FieldsOf)), None)


def _options(group: Any) -> Iterator[Parameter]:
    if isinstance(group, FieldsOf):
        yield from group.options()
        return
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if default is MISSING else default,
            annotation=hints[field.name],
        )
