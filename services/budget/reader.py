"""Reading a ledger: for its writer when it starts, and for anyone else at any time."""

from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Connection, select

from services.budget import layout
from services.budget.book import Balance, Book
from services.budget.chain import Row
from services.budget.database import Database
from services.budget.table import ledger_table
from services.budget.terms import Terms

_BATCH = 10_000


def rows(connection: Connection, since: int = 1) -> Iterator[Row]:
    """The rows from number `since` on, in their order."""
    query = select(ledger_table).where(ledger_table.c.seq >= since).order_by(ledger_table.c.seq)
    return (Row(*row) for row in connection.execute(query, execution_options={"yield_per": _BATCH}))


def every_row(connection: Connection) -> Iterator[Row]:
    """All rows as they stand.

    Raises:
        LedgerForeign: there is no ledger, or one of a layout that this version does not know.
    """
    layout.check(connection)
    return rows(connection)


def replay(connection: Connection) -> Book:
    """Everything in the ledger, its chain verified."""
    return Book(every_row(connection))


def check(ledger: str | Path, terms: Terms) -> None:
    """Whether a ledger keeps these terms: before anything is started, and without taking it from who writes it.

    Raises:
        LedgerMismatch: it keeps others.
        LedgerError: it cannot be read.
    """
    with Database(ledger, "read").transaction() as connection:
        replay(connection).terms.demand(terms)


def read(ledger: str | Path) -> Balance:
    """Where the ledger at this path or URL stands, its whole chain verified. Writes nothing; a writer may be at work.

    Raises:
        LedgerError: the ledger cannot be read; the subclass and the message say why.
    """
    with Database(ledger, "read").transaction() as connection:
        return replay(connection).balance()
