"""`privmix keys`: who may use the service, and how much. Changes apply to a running service at once."""

import json
from datetime import timedelta
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.keys.database import Database
from services.keys.records import CLIENT_SCOPES, SCOPES, KeyAccount, Share, Usage, now
from services.keys.store import KeyStore

keys = typer.Typer(name="keys", help="Keys of the service, and their shares of its budget.", no_args_is_help=True)

DatabaseOption = Annotated[
    str,
    typer.Option(
        "--database",
        envvar="PRIVMIX_KEYS__DATABASE",
        help="A SQLite file or a PostgreSQL URL. A service keeps keys beside its ledger by default.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
KeyArgument = Annotated[str, typer.Argument(help="The key's id or name.")]
TokensOption = Annotated[int | None, typer.Option(min=0, help="Tokens of the privacy budget, in all.")]
DayOption = Annotated[int | None, typer.Option(min=0, help="Tokens of the privacy budget a day (UTC).")]
RequestsOption = Annotated[int | None, typer.Option(min=1, help="Requests a minute.")]
RateOption = Annotated[int | None, typer.Option(min=1, help="Tokens a minute.")]
StreamsOption = Annotated[int | None, typer.Option(min=1, help="Answers under way at one time.")]
LargestOption = Annotated[int | None, typer.Option(min=1, help="Tokens that one request may ask for.")]

DEFAULT = "keys.db"


class ScopeChoice(Enum):
    """Typer reads several choices as an enumeration only."""

    GENERATE = "generate"
    PRIVACY = "privacy"
    ADMINISTER = "administer"


@keys.command()
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A name for the key, of its own.")],
    owner: Annotated[str, typer.Option(help="Who answers for it.")] = "",
    group: Annotated[str | None, typer.Option(help="Keys of a group also have one share together.")] = None,
    scope: Annotated[
        list[ScopeChoice] | None, typer.Option(help="What it may do; may be given several times.", show_default=False)
    ] = None,
    days: Annotated[int | None, typer.Option(min=1, max=36_500, help="Days until it expires.")] = None,
    tokens: TokensOption = None,
    tokens_per_day: DayOption = None,
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: RateOption = None,
    live_streams: StreamsOption = None,
    largest_request: LargestOption = None,
    database: DatabaseOption = DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Make a key. Its secret is printed this once; only a hash of it is kept."""
    key, secret = KeyStore(Database(database)).create(
        name,
        owner=owner,
        group=group,
        scopes=tuple(each for each in SCOPES if ScopeChoice(each) in scope) if scope else CLIENT_SCOPES,
        expires=now() + timedelta(days=days) if days else None,
        share=_share(context),
    )
    _print_secret(key.model_dump(mode="json"), secret.text, as_json)


@keys.command("list")
def list_keys(database: DatabaseOption = DEFAULT, as_json: JsonOption = False) -> None:
    """Show every key, its share, and what it used."""
    accounts = KeyStore(Database(database, create=False)).accounts()
    if as_json:
        print(json.dumps([account.model_dump(mode="json") for account in accounts], indent=2))
        return
    table = Table("name", "id", "owner", "group", "scopes", "state")
    for column in ("tokens used", "of", "today", "of"):
        table.add_column(column, justify="right")
    for account in accounts:
        table.add_row(*_cells(account))
    Console().print(table)


@keys.command()
def limit(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="The key's id or name; with --group, the group's name.")],
    tokens: TokensOption = None,
    tokens_per_day: DayOption = None,
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: RateOption = None,
    live_streams: StreamsOption = None,
    largest_request: LargestOption = None,
    group: Annotated[bool, typer.Option("--group", help="Limit what all keys of a group have together.")] = False,
    database: DatabaseOption = DEFAULT,
) -> None:
    """Replace a share; what is not given has no limit."""
    share = _share(context)
    store = KeyStore(Database(database, create=False))
    if group:
        store.limit_group(key, share)
    else:
        store.limit(key, share)
    limits = ", ".join(f"{name} {value}" for name, value in share.model_dump(exclude_none=True).items())
    Console().print(f"{escape(key)}: {limits or 'no limits'}")


@keys.command()
def rotate(
    key: KeyArgument,
    grace_s: Annotated[int, typer.Option(min=0, help="Seconds for which the old secret goes on.")] = 0,
    database: DatabaseOption = DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Give a key another secret, which is printed this once."""
    rotated, secret = KeyStore(Database(database, create=False)).rotate(key, timedelta(seconds=grace_s))
    _print_secret(rotated.model_dump(mode="json"), secret.text, as_json)


@keys.command()
def revoke(key: KeyArgument, database: DatabaseOption = DEFAULT) -> None:
    """Refuse a key from now on, for good. What it used stays on record."""
    revoked = KeyStore(Database(database, create=False)).revoke(key)
    Console().print(f"{escape(revoked.name)} is revoked")


def _share(context: typer.Context) -> Share:
    """The share that the options of a command name; an option that is not given sets no limit."""
    return Share.model_validate({name: context.params[name] for name in Share.model_fields})


def _print_secret(key: dict[str, Any], secret: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"secret": secret, "key": key}, indent=2))
        return
    Console(stderr=True).print(f"Key {escape(key['name'])} ({key['id']}); this secret is not shown again:")
    print(secret)


def _cells(account: KeyAccount) -> tuple[str, ...]:
    key, share, usage = account.key, account.share, account.usage
    state = "revoked" if key.revoked else "expired" if not key.valid(now()) else "valid"
    identity = (key.name, key.id, key.owner, key.group or "", ", ".join(key.scopes), state)
    return (*map(escape, identity), *amounts(share, usage))


def amounts(share: Share, usage: Usage) -> tuple[str, str, str, str]:
    """What was used of a share, in all and today, each with its limit."""
    today = usage.spent_today + usage.held_today
    return str(usage.charged), _limit(share.tokens), str(today), _limit(share.tokens_per_day)


def _limit(value: int | None) -> str:
    return "-" if value is None else str(value)
