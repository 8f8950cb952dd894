"""Does the work of `privmix keys`."""

import typer
from rich.markup import escape

from privmix.database.clock import now
from privmix.keys.records import KeyAccount, Share, ShareUsage


def share_of(context: typer.Context) -> Share:
    """Returns the share from a command's options. An option that is not given sets no limit."""
    return Share.model_validate({name: context.params[name] for name in Share.model_fields})


def key_cells(account: KeyAccount) -> tuple[str, ...]:
    key, share, usage = account.key, account.share, account.usage
    state = "revoked" if key.revoked else "expired" if not key.valid(now()) else "valid"
    identity = (key.name, key.id, key.owner, key.group or "", ", ".join(key.scopes), state)
    return (*map(escape, identity), *amounts(share, usage))


def amounts(share: Share, usage: ShareUsage) -> tuple[str, str, str, str]:
    """Returns the used tokens of a share, in total and today, each with its limit."""
    today = usage.spent_today + usage.held_today
    return str(usage.charged), _limit(share.tokens), str(today), _limit(share.tokens_per_day)


def _limit(value: int | None) -> str:
    return "-" if value is None else str(value)
