"""Exports a ledger as JSON Lines, one row on each line with its hash, and verifies ledgers and exported files."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from services.budget.chain import LedgerRow
from services.budget.records import KINDS
from services.budget.state import Balance, LedgerState
from services.budget.store.database import LedgerDatabase
from services.budget.store.rows import every_row
from services.database.sqlite import MAGIC
from services.errors import LedgerCorrupt, LedgerError, LedgerUnavailable

LEFT_OUT = "left_out"
"""The field of an exported row that names the private values which its body lacks."""


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
            shown: dict[str, Any] = asdict(row)
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


def verify(place: str | Path, *, head: str | None = None, length: int | None = None) -> Balance:
    """Verifies a whole ledger or exported file and returns its balance.

    Args:
        head: the hash, or a prefix of the hash, of a row that was once the last. The row must still exist.
        length: a former number of rows. The ledger must have at least as many; with `head`, it is that row's number.

    Raises:
        LedgerCorrupt: a row was changed, or rows were removed from the end. The message names the row.
        LedgerError: the ledger cannot be read. The subclass and the message say why.
    """
    matches: list[int] = []

    def watched(rows: Iterable[LedgerRow]) -> Iterator[LedgerRow]:
        for row in rows:
            if head is None or row.hash.startswith(head):
                matches.append(row.seq)
            yield row

    with _rows(place) as rows:
        balance = LedgerState.replay(watched(rows)).balance()
        if length is not None and balance.rows < length:
            raise LedgerCorrupt(f"it had {length} rows and has {balance.rows} now: rows were removed from its end")
        if head is not None and not (matches if length is None else length in matches):
            problem = f"no row has the hash {head}" if length is None else f"row {length} does not have the hash {head}"
            raise LedgerCorrupt(f"{problem}: rows were removed from its end, or it was rewritten")
    return balance


@contextmanager
def _rows(place: str | Path) -> Iterator[Iterable[LedgerRow]]:
    if not _is_exported(place):
        with LedgerDatabase(place, "read").transaction() as connection:
            yield every_row(connection)
        return
    path = Path(place).expanduser()
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield map(_parsed, count(1), lines)
    except OSError as error:
        raise LedgerUnavailable(f"{error.strerror}; check that this user may read it").of(str(path)) from error
    except LedgerError as error:
        error.of(str(path))
        raise


def _is_exported(place: str | Path) -> bool:
    path = Path(place).expanduser()
    if "://" in str(place) or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) not in (b"", MAGIC)


def _parsed(number: int, line: str) -> LedgerRow:
    try:
        row = json.loads(line)
        if LEFT_OUT in row:
            raise LedgerUnavailable(
                f"line {number} was exported without its private values, so nothing from there can be verified; verify "
                "the ledger, or a file of `privmix ledger export --private-values`"
            )
        return LedgerRow(**row)
    except (TypeError, ValueError) as error:
        raise LedgerCorrupt(
            f"line {number} is not a row of an exported ledger, and the file is not a SQLite database"
        ) from error
