"""Exports a ledger as JSON Lines, one row on each line with its hash. `verification.py` verifies the file."""

import json
from pathlib import Path
from typing import Any, TextIO

from privmix.budget.chain import LedgerRow
from privmix.budget.records import KINDS
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.rows import every_row
from privmix.budget.verification import LEFT_OUT


def export(ledger: str | Path, lines: TextIO, *, private: bool = False) -> int:
    """Writes the rows without verifying them and returns their number.

    Args:
        private: write the values that depend on the private text, too. Without them, there are no hashes from the
            first row that had such values: a hash would confirm a guess of them.

    Raises:
        LedgerError: the ledger does not exist or cannot be read.
    """
    written, hashes = 0, True
    with LedgerDatabase(ledger, "read").transaction() as connection:
        for written, row in enumerate(every_row(connection), start=1):  # noqa: B007 (the last number is the count)
            shown: dict[str, Any] = row.fields()
            body, left_out = _public(row)
            if left_out and not private:
                shown |= {"body": body, LEFT_OUT: left_out}
                hashes = False
            if not hashes:
                del shown["previous"], shown["hash"]
            lines.write(json.dumps(shown, default=repr) + "\n")
    return written


def _public(row: LedgerRow) -> tuple[str, list[str]]:
    """Returns a row's body without private values, and the names of those; without any value if it is damaged."""
    try:
        body = dict(json.loads(row.body))
    except (TypeError, ValueError):
        return "", ["body"]
    names = KINDS[row.kind].private if row.kind in KINDS else frozenset(body)
    left_out = sorted(name for name in names if body.get(name))
    return json.dumps({name: value for name, value in body.items() if name not in left_out}), left_out
