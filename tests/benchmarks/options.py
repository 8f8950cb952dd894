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
ProtocolsOption = Annotated[list[str], typer.Option("--protocol", help="Repeatable.")]
EnsembleSizesOption = Annotated[list[int], typer.Option("--parts", help="Of the ensemble; repeatable.")]
PromptTokensOption = Annotated[list[int], typer.Option(help="Of each prompt; repeatable.")]
StreamsOption = Annotated[list[int], typer.Option(help="Concurrent; repeatable.")]
SampleOption = Annotated[int | None, typer.Option(help="Parts that `exponential` draws for a token; by default all.")]
RoundsOption = Annotated[int, typer.Option(help="Alternating rounds of both sides; medians are compared.")]
QuickCellOption = Annotated[bool, typer.Option("--quick", help="One small cell, one round.")]

PROTOCOLS = ["pmixed", "exponential"]
ENSEMBLE_SIZES = [8, 80, 400]
PROMPT_TOKENS = [64, 512]
STREAMS = [1, 8, 32, 128]


def show(figures: Mapping[Any, Any], as_json: bool) -> None:
    """Prints figures: as JSON, or as YAML with four digits, which a person reads faster."""
    text = json.dumps(figures, indent=1, ensure_ascii=False)
    if not as_json:
        shorter = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.4g}"))
        text = yaml.safe_dump(shorter, sort_keys=False, allow_unicode=True, width=140)
    print(text)
