"""Implements `privmix protocols`, which lists the protocols."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from privmix.privacy.settings import Settings


def protocols(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List all protocols: the guarantee, the queried models, the reasons to choose it, and the parameters."""
    from privmix.privacy.protocols import PROTOCOLS

    if as_json:
        print(json.dumps([_record(settings) for settings in PROTOCOLS.values()], indent=2))
        return
    console = Console()
    for settings in PROTOCOLS.values():
        _show(_record(settings), console)


def _record(settings: "type[Settings]") -> dict[str, Any]:
    from privmix.privacy.settings import Settings

    # That of the default settings, which does not depend on the number of parts.
    guarantee = settings().plan(1 if settings.one_model else 2).guarantee  # type: ignore[call-arg]
    return {
        "name": settings.model_fields["protocol"].default,
        "summary": (settings.__doc__ or "").split("\n\n")[0],
        "guarantee": guarantee.status,
        "protects": guarantee.protects,
        "source": guarantee.source,
        "choose": settings.choose,
        "derived": settings.derived,
        "parameters": {
            name: {"default": field.default, "description": field.description}
            for name, field in settings.model_fields.items()
            if name not in Settings.model_fields
        },
    }


def _show(record: Mapping[str, Any], console: Console) -> None:
    console.print(f"[bold]{record['name']}[/]  {escape(record['summary'])}")
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("guarantee", escape(f"{record['guarantee']} ({record['source']})"))
    table.add_row("choose it for", escape(record["choose"]))
    for name, parameter in record["parameters"].items():
        default = "" if parameter["default"] is None else f" [{parameter['default']}]"
        table.add_row(f"  {name}", escape(parameter["description"] + default))
    console.print(table)
    console.print()
