"""Implements `privmix ledger`, which creates, verifies and charges ledgers."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privmix.foundation.errors import LeaseRefused, LedgerError
from privmix_cluster.options import JsonOption

if TYPE_CHECKING:
    from privmix.budget.signing import SigningKey

ledger = typer.Typer(name="ledger", help="Create, verify or charge the budget's ledger.", no_args_is_help=True)

KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--signing-key-file",
        help="The file with the key that signs the chain. Default: the key in PRIVMIX_BUDGET__SIGNING_KEY, or in the "
        "file that PRIVMIX_BUDGET__SIGNING_KEY_FILE names.",
    ),
]


@ledger.command()
def init(
    config: Annotated[Path, typer.Option(help="The YAML file of the deployment.")],
    as_json: JsonOption = False,
) -> None:
    """Create the ledger of an ensemble and record it in the ensemble's directory. A repeated call only checks it."""
    from privmix.budget.receipt import begin
    from privmix.training.manifest import Manifest
    from privmix_cluster.configuration import Configuration
    from privmix_cluster.promise import promise

    configuration = Configuration.load(config)
    manifest = Manifest.load(configuration.ensemble)
    promised, settings = promise(configuration, manifest), configuration.budget
    begun = begin(settings.ledger, promised.terms, configuration.ensemble, settings.anchor, settings.key())
    if as_json:
        print(json.dumps({"id": begun.ledger, "ledger": begun.place, "ensemble": manifest.ensemble, "new": begun.new}))
        return
    print(f"{'Created' if begun.new else 'Found'} ledger {begun.place} with id {begun.ledger}")
    print(promised.sentence)


@ledger.command()
def forfeit(
    config: Annotated[
        Path, typer.Option(help="The YAML file of the deployment, which names the ledger and its anchors.")
    ],
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Charge at least this many. Default: exactly what the anchors know to be lost."),
    ] = None,
) -> None:
    """Charge tokens that may have been released after the copy from which a ledger was restored.

    Stop the service first. It does not start with a ledger that lacks rows until then.
    """
    from privmix.budget.ledger import Ledger
    from privmix.budget.reading import read
    from privmix.budget.receipt import anchors_of
    from privmix.budget.statement import statement
    from privmix_cluster.configuration import Configuration

    configuration = Configuration.load(config)
    settings = configuration.budget
    anchors = anchors_of(configuration.ensemble, settings.anchor)
    writer = Ledger.restore(settings.ledger, read(settings.ledger).terms, anchors=anchors, key=settings.key())
    try:
        charged = writer.forfeit(tokens)
    except LeaseRefused as error:
        raise typer.BadParameter(str(error), param_hint="--tokens") from error
    balance = writer.balance()
    for event, count in charged.items():
        print(f"{count} tokens are charged at the cost of {event.to_json()}")
    print(f"{charged.total()} tokens are charged now, {sum(balance.charged.values())} in all.")
    left = statement(balance).tokens_left
    if balance.stopped:
        print("Their losses on the private text are not known, so nothing private is released any more.")
    elif left is not None:
        print(f"{left} tokens are left.")


@ledger.command()
def verify(
    place: Annotated[str, typer.Argument(metavar="LEDGER", help="A SQLite file or a database URL.")],
    signing_key_file: KeyFileOption = None,
    head: Annotated[str, typer.Option(help="A last hash noted earlier (16 digits or more), which must be there.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Verify the hash chain and the content of its rows; exit with 1 and name the first bad row if one is invalid.

    With the key that signs the chain, verify that nobody without it wrote or rewrote a row.
    """
    from privmix.budget.reading import verify as verified

    if head and not re.fullmatch("[0-9a-fA-F]{16,64}", head):
        raise typer.BadParameter("must be the first 16 hexadecimal digits of a hash, or more", param_hint="--head")
    try:
        key = _signing_key(signing_key_file)
        balance = verified(place, key, head.lower())
    except LedgerError as error:
        if not as_json:
            raise
        print(json.dumps({"valid": False, "error": str(error)}, indent=2))
        raise typer.Exit(1) from error
    summary = {
        "rows": balance.rows,
        "head": balance.head,
        "epoch": balance.epoch,
        "checked": {"chain": True, "head": bool(head), "signature": key is not None},
        "signed_with": balance.signature and balance.signature.signed.key,
    }
    if as_json:
        print(json.dumps({"valid": True, **summary}, indent=2))
        return
    print(f"{balance.rows} rows, epoch {balance.epoch}, last hash {balance.head}: the chain is whole")
    if key is not None:
        print(f"The key {key.name} signed all of it: nobody without this key wrote or rewrote a row.")
    elif balance.signature is not None:
        row, signed = balance.signature
        print(
            f"Row {row.seq} has the last signature, of the key {signed.key}, which was not checked: give the key with "
            "--signing-key-file."
        )
    else:
        print("It is not signed (budget.signing_key): the chain does not show whether it was rewritten to its end.")
    if not head:
        print("Only an anchor, or a hash noted earlier (--head), shows that nothing was taken off its end.")


def _signing_key(file: Path | None) -> "SigningKey | None":
    """Returns the key in a file, or that of the environment; None without both."""
    from privmix.budget.signing import SigningKey
    from privmix_cluster.secret_files import text_of, variable

    return SigningKey.of(text_of(file, "--signing-key-file") if file else variable("PRIVMIX_BUDGET__SIGNING_KEY"))
