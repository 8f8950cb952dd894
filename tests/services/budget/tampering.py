"""Reads the rows of a ledger and tampers with them, like somebody with write access to its database."""

import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import insert

from privmix.budget.chain import LedgerRow, link
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.rows import every_row, rows
from privmix.budget.store.schema import ledger_table


def tamper(path: Path, statement: str) -> None:
    """Drops the triggers and runs the statement."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for event in ("UPDATE", "DELETE", "INSERT"):
            connection.execute(f"DROP TRIGGER privmix_ledger_{event}")
        connection.execute(statement)


def stored(place: str | Path) -> list[LedgerRow]:
    with LedgerDatabase(place, "read").transaction() as connection:
        return list(every_row(connection))


def append(place: str | Path, *, epoch: int, kind: str, body: str) -> LedgerRow:
    """Appends a row with correct hashes."""
    with LedgerDatabase(place, "write").transaction() as connection:
        *_, last = rows(connection)
        row = link(last, epoch=epoch, kind=kind, body=body, at=last.at)
        connection.execute(insert(ledger_table).values(row._asdict()))
    return row
