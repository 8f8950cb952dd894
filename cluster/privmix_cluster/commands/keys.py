"""Implements `privmix keys`, which manages API keys and shares. Changes apply to a running service within a second."""

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from privmix_cluster.options import JsonOption
from privmix_cluster.tables import show_table

if TYPE_CHECKING:
    from privmix.keys.records import KeyAccount, Share
    from privmix.keys.store import KeyStore

keys = typer.Typer(
    name="keys", help="Manage the service's API keys and their shares of the budget.", no_args_is_help=True
)

DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        help="A SQLite file or a PostgreSQL URL. Default, as in a service: PRIVMIX_KEYS__DATABASE, or what belongs to "
        "the ledger in PRIVMIX_BUDGET__LEDGER; without them, keys.db. PRIVMIX_..._FILE names a file with the value.",
    ),
]
KeyArgument = Annotated[str, typer.Argument(help="The key's id or name.")]
MOST = 2**53 - 1  # every database and JSON reader can hold it
TokensOption = Annotated[
    int | None, typer.Option(min=0, max=MOST, help="The total number of tokens of the privacy budget.")
]
StreamsOption = Annotated[int | None, typer.Option(min=1, max=MOST, help="The maximum number of concurrent streams.")]


def _store(database: str | None, *, create: bool = False) -> "KeyStore":
    from privmix.database.service import ServiceDatabase, default_database
    from privmix.keys.store import KeyStore
    from privmix_cluster.secret_files import variable

    named = database or variable("PRIVMIX_KEYS__DATABASE")
    place = named or default_database(variable("PRIVMIX_BUDGET__LEDGER") or "ledger.db")
    return KeyStore(ServiceDatabase(place, create=create))


@keys.command()
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A unique name for the key.")],
    days: Annotated[int | None, typer.Option(min=1, max=36_500, help="Days until it expires.")] = None,
    tokens: TokensOption = None,
    live_streams: StreamsOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a key. Its secret is printed only once; the service stores only a hash."""
    key, secret = _store(database, create=True).create(
        name,
        expires=datetime.now(UTC) + timedelta(days=days) if days else None,
        share=_share_of(context),
    )
    _print_secret(key.model_dump(mode="json"), secret.text, as_json)


@keys.command("list")
def list_keys(database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Show every key, its share and its usage."""
    accounts = _store(database).accounts()
    if as_json:
        print(json.dumps([account.model_dump(mode="json") for account in accounts], indent=2))
        return
    show_table("Keys", [_row(account) for account in accounts])


@keys.command()
def limit(
    context: typer.Context,
    key: KeyArgument,
    tokens: TokensOption = None,
    live_streams: StreamsOption = None,
    database: DatabaseOption = None,
) -> None:
    """Replace a share. A limit that is not given is removed."""
    share = _share_of(context)
    _store(database).limit(key, share)
    limits = ", ".join(f"{name} {value}" for name, value in share.model_dump(exclude_none=True).items())
    Console().print(f"{escape(key)}: {limits or 'no limits'}")


@keys.command()
def rotate(
    key: KeyArgument,
    grace_s: Annotated[int, typer.Option(min=0, help="Seconds for which the old secret stays valid.")] = 0,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a key a new secret, which is printed only once."""
    rotated, secret = _store(database).rotate(key, timedelta(seconds=grace_s))
    _print_secret(rotated.model_dump(mode="json"), secret.text, as_json)


@keys.command()
def revoke(key: KeyArgument, database: DatabaseOption = None) -> None:
    """Revoke a key permanently. Its usage stays on record."""
    revoked = _store(database).revoke(key)
    Console().print(f"{escape(revoked.name)} is revoked")


def _print_secret(key: dict[str, Any], secret: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"secret": secret, "key": key}, indent=2))
        return
    Console(stderr=True).print(f"Key {escape(key['name'])} ({key['id']}); this secret is not shown again:")
    print(secret)


def _share_of(context: typer.Context) -> "Share":
    """Returns the share from a command's options. An option that is not given sets no limit."""
    from privmix.keys.records import Share

    return Share.model_validate({name: context.params[name] for name in Share.model_fields})


def _row(account: "KeyAccount") -> dict[str, Any]:
    key, share, usage = account.key, account.key.share, account.usage
    return {
        "name": key.name,
        "id": key.id,
        "state": "revoked" if key.revoked else "expired" if not key.valid(datetime.now(UTC)) else "valid",
        "tokens used": usage.charged,
        "of": share.tokens,
    }
