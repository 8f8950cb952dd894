"""Declares the options that several benchmarks share, and prints their figures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

OutputOption = Annotated[Path, typer.Option(help="Where what is trained and measured is kept.")]
CorporaOption = Annotated[list[Path], typer.Option(help="JSON Lines with user and text; public or set-aside.")]
DemoOption = Annotated[bool, typer.Option("--demo", help="The demo corpus, of 1,000 fictional people.")]
WriteOption = Annotated[bool, typer.Option("--write", help="Replace the table that `privmix plan` reads.")]
QuickCellOption = Annotated[bool, typer.Option("--quick", help="One small cell, one round.")]


def show(figures: Mapping[Any, Any], as_json: bool) -> None:
    """Prints figures: as JSON, or as YAML with four digits, which a person reads faster."""
    text = json.dumps(figures, indent=1, ensure_ascii=False)
    if not as_json:
        shorter = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.4g}"))
        text = yaml.safe_dump(shorter, sort_keys=False, allow_unicode=True, width=140)
    print(text)
