"""Implements `privmix demo-corpus`, which writes a fictional private corpus."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def demo_corpus(
    directory: Annotated[Path, typer.Argument(help="The directory for the files; created if it does not exist.")],
    users: Annotated[int, typer.Option(help="The number of fictional people, including the held-out ones.")] = 400,
    held_out: Annotated[
        int, typer.Option(help="The number of people whose dialogues are not in the training file.")
    ] = 40,
    seed: Annotated[int, typer.Option(help="The random seed. The same seed writes the same files.")] = 0,
) -> None:
    """Write train.jsonl, heldout.jsonl and canaries.jsonl: dialogues of a fictional clinic's appointment line."""
    from privmix.training import demo

    demo.write_demo_corpus(directory, users=users, held_out=held_out, seed=seed)
    if sys.stdout.isatty():
        typer.echo(f"Next: privmix train {directory / demo.TRAIN} --output ensemble {_flags()}")


def _flags() -> str:
    from privmix.training import demo

    chosen = demo.TRAINING.model_dump(exclude_defaults=True)
    return " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in chosen.items())
