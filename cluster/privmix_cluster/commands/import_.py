"""Implements `privmix import`, which makes an ensemble of adapters that PEFT trained elsewhere."""

from pathlib import Path
from typing import Annotated

import typer


def import_(
    adapters: Annotated[
        list[Path],
        typer.Argument(metavar="DIR", help="Directories that PEFT's `save_pretrained` wrote, one a part."),
    ],
    output: Annotated[Path, typer.Option(help="The directory of the ensemble.")],
    model: Annotated[
        str | None,
        typer.Option(help="The model that all were trained on: a directory or hub id. Default: the one they name."),
    ] = None,
) -> None:
    """Make an ensemble of plain LoRA adapters that PEFT trained elsewhere, one adapter a part."""
    from privmix.budget.sentence import IMPORTED
    from privmix.training.imported import import_adapters

    manifest = import_adapters(adapters, output, model)
    typer.echo(f"{output}: {len(manifest.parts)} parts imported, on {manifest.base_model}")
    typer.echo(f"Its guarantee holds only if {IMPORTED}. The adapters have no halves, so SubMix does not run.")
