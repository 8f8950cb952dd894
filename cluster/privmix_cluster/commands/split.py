"""Implements `privmix split`, which divides a corpus by user into training text and held-out text."""

from pathlib import Path
from typing import Annotated

import typer

from privmix_cluster.option_groups import grouped
from privmix_cluster.options import CorpusArgument, CorpusOptions


@grouped
def split(
    corpus: CorpusArgument,
    reading: CorpusOptions,
    train_out: Annotated[Path, typer.Option(help="The file for the training text.")],
    held_out_out: Annotated[Path, typer.Option(help="The file for the held-out text.")],
    held_out: Annotated[float, typer.Option(help="The fraction of users to hold out.")] = 0.1,
    salt_file: Annotated[
        Path | None, typer.Option(help="The secret of the split, created on first use. Default: beside --train-out.")
    ] = None,
) -> None:
    """Hold out whole users by a keyed hash of their ids, so that training and evaluation share no users."""
    from privmix.training.corpus import kinds
    from privmix.training.split import split as split_corpus

    documents = reading.corpus(corpus)
    salt = salt_file or train_out.parent / "split.salt"
    sides = split_corpus(documents, train_out, held_out_out, fraction=held_out, salt_file=salt)
    for path, side in zip((train_out, held_out_out), sides, strict=True):
        typer.echo(f"{path}: {side.documents} documents of {len(side.users)} users")
    if documents.skipped:
        typer.echo(f"skipped {documents.skipped.total()} bad rows: {kinds(documents.skipped)}")
