"""Implements `privmix ledger`, which creates, exports, verifies, moves and charges ledgers."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.markup import escape

from cluster.configuration import Configuration
from cluster.options import EnsembleOption, JsonOption
from cluster.promise import promise
from services.budget import export as exporting
from services.budget import move as moving
from services.budget.errors import LeaseRefused, LedgerError
from services.budget.ledger import Ledger
from services.budget.reader import read
from services.budget.receipt import begin
from services.budget.statement import statement
from services.training.manifest import Manifest

ledger = typer.Typer(
    name="ledger", help="Create, export, verify, move or charge the budget's ledger.", no_args_is_help=True
)

Source = Annotated[str, typer.Argument(metavar="LEDGER", help="A SQLite file or a database URL.")]


@ledger.command()
def init(
    config: Annotated[Path, typer.Option(help="The YAML file of the deployment.")],
    ensemble: EnsembleOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create the ledger of an ensemble and record it in the ensemble's directory. A repeated call only checks it."""
    configuration = Configuration.load(config).choose(ensemble)
    manifest = Manifest.load(configuration.ensemble)
    with _ledger_errors_printed():
        promised = promise(configuration, manifest)
        begun = begin(configuration.budget.ledger, promised.terms, configuration.ensemble)
    if as_json:
        print(json.dumps({"id": begun.ledger, "ledger": begun.place, "ensemble": manifest.ensemble, "new": begun.new}))
        return
    print(f"{'Created' if begun.new else 'Found'} ledger {begun.place} with id {begun.ledger}")
    print(promised.sentence)


@ledger.command()
def forfeit(
    source: Source,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that may have been released since the backup.")],
) -> None:
    """Charge tokens that may have been released after the backup from which a ledger was restored.

    Stop the service first.
    """
    try:
        with _ledger_errors_printed():
            writer = Ledger(source, read(source).terms, create=False)
            event = writer.forfeit(tokens)
    except LeaseRefused as error:
        raise typer.BadParameter(str(error), param_hint="--tokens") from error
    balance = writer.balance()
    print(f"{tokens} tokens are charged at the cost of {event.to_json()}, {sum(balance.charged.values())} in all.")
    left = statement(balance).tokens_left
    if balance.stopped:
        print("Their losses on the private text are not known, so nothing private is released any more.")
    elif left is not None:
        print(f"{left} tokens are left.")


@ledger.command()
def export(
    source: Source,
    output: Annotated[
        Path | None, typer.Option(help="The output file, replaced atomically. Default: standard output.")
    ] = None,
) -> None:
    """Write all rows as JSON Lines, each with its hash. They may contain losses measured on the private text."""
    with _ledger_errors_printed(), _written(output) as lines:
        exporting.export(source, lines)


@ledger.command()
def verify(
    place: Annotated[str, typer.Argument(metavar="LEDGER|FILE", help="A ledger, or a file from `export`.")],
    head: Annotated[
        str | None, typer.Option(help="A last hash noted earlier (16 digits or more): it must still be in the chain.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="The former number of rows: none may be missing from the end.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify the hash chain and the content of its rows; exit with 1 and name the first bad row if one is invalid."""
    if head is not None and not _is_hash(head):
        raise typer.BadParameter(
            "must be the 64 hexadecimal digits of a hash, or the first 16 or more", param_hint="--head"
        )
    try:
        balance = exporting.verify(place, head=head and head.lower(), length=rows)
    except LedgerError as error:
        if not as_json:
            raise _refusal(error) from error
        print(json.dumps({"valid": False, "error": str(error)}, indent=2))
        raise typer.Exit(1) from error
    summary = {"rows": balance.rows, "head": balance.head, "epoch": balance.epoch, "moved": balance.moved}
    if as_json:
        print(json.dumps({"valid": True, **summary}, indent=2))
        return
    moved = f"; moved to {balance.moved}" if balance.moved else ""
    print(f"{balance.rows} rows, epoch {balance.epoch}, last hash {balance.head}: the chain is whole{moved}")
    if head is None:
        print("Only a hash kept elsewhere (--head) shows that nothing was taken off its end.")


@ledger.command()
def move(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The ledger: a SQLite file or a database URL.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="A database without a ledger: a file or a URL.")],
) -> None:
    """Move a ledger with its chain; the old one can never be written again.

    Stop the service first. If the move is interrupted, run it again.
    """
    with _ledger_errors_printed():
        balance = moving.move(source, target)
    print(f"{balance.rows} rows, last hash {balance.head}, are verified in the new ledger; set budget.ledger to it.")
    print("The old one can still be read, and never be written again.")


def _is_hash(text: str) -> bool:
    return 16 <= len(text) <= 64 and all(digit in "0123456789abcdefABCDEF" for digit in text)


@contextmanager
def _ledger_errors_printed() -> Iterator[None]:
    try:
        yield
    except LedgerError as error:
        raise _refusal(error) from error


def _refusal(error: LedgerError) -> typer.Exit:
    Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(str(error))}")
    return typer.Exit(1)


@contextmanager
def _written(output: Path | None) -> Iterator[TextIO]:
    """Writes a file atomically, readable only by this user, because it may contain measured losses."""
    if output is None:
        yield sys.stdout
        return
    partial = output.with_name(f"{output.name}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise typer.BadParameter(f"{partial}: {error.strerror}", param_hint="--output") from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as lines:
            yield lines
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
