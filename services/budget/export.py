"""A ledger as a file of JSON Lines: one row each, in order, with its hash; verified without any database."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TextIO

from services.budget.chain import Row
from services.budget.errors import LedgerCorrupt, LedgerError, LedgerUnavailable
from services.budget.state import Balance, LedgerState
from services.budget.store.database import Database
from services.budget.store.rows import every_row
from services.budget.store.sqlite import MAGIC


def export(ledger: str | Path, lines: TextIO) -> int:
    """Writes the rows as they stand, right or wrong, and returns how many there are.

    Raises:
        LedgerError: there is no ledger, or it cannot be read.
    """
    written = 0
    with Database(ledger, "read").transaction() as connection:
        for written, row in enumerate(every_row(connection), start=1):  # noqa: B007 (the last one is the count)
            lines.write(json.dumps(asdict(row), default=repr) + "\n")
    return written


def verify(place: str | Path, *, head: str | None = None, length: int | None = None) -> Balance:
    """Reads a whole ledger or exported file; returns where it stands.

    Args:
        head: the hash of the row that was once the last, or the beginning of that hash: it must still be there.
        length: how many rows there once were; with `head`, that row's number.

    Raises:
        LedgerCorrupt: naming the first row that is not what was written, or what was taken off the end.
        LedgerError: nothing could be read; the subclass and the message say why.
    """
    seen: list[int] = []

    def watched(rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            if head is None or row.hash.startswith(head):
                seen.append(row.seq)
            yield row

    with _rows(place) as rows:
        balance = LedgerState.replay(watched(rows)).balance()
        if length is not None and balance.rows < length:
            raise LedgerCorrupt(f"there were {length} rows, and there are {balance.rows}: rows were taken off its end")
        if head is not None and not (seen if length is None else length in seen):
            where = "no row" if length is None else f"row {length} is another one: it"
            raise LedgerCorrupt(f"{where} has the hash {head}: rows were taken off its end, or it was written anew")
    return balance


@contextmanager
def _rows(place: str | Path) -> Iterator[Iterable[Row]]:
    if not _is_exported(place):
        with Database(place, "read").transaction() as connection:
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


def _parsed(number: int, line: str) -> Row:
    try:
        return Row(**json.loads(line))
    except (TypeError, ValueError) as error:
        raise LedgerCorrupt(
            f"line {number} is no row of an exported ledger, and the file is no SQLite database"
        ) from error
