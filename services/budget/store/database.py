"""Where a ledger is kept: one append-only table, in a SQLite file or in PostgreSQL by URL."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError

from services.budget.errors import LedgerError, LedgerForeign, LedgerMissing
from services.budget.store import postgresql, sqlite
from services.budget.store.schema import Access


class Database:
    """The database that `ledger`, a path or a URL, names. Opening is lazy: the first transaction connects.

    `name` is the absolute path or the URL, without its password.
    """

    def __init__(self, ledger: str | Path, access: Access) -> None:
        url = _resolve(ledger)
        if url.get_backend_name() == "sqlite":
            self.name = url.database or ""
            self._engine = sqlite.engine(Path(self.name), access)
            self._explained = sqlite.explained
        else:
            self.name = str(url)  # hides the password
            self._engine = postgresql.engine(url, access)
            self._explained = postgresql.explained

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One transaction, alone among writers when there is write access; committed to disk when this returns.

        Raises:
            LedgerError: the database failed, or the body said so; names the ledger.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except DBAPIError as error:
            raise self._explained(error).of(self.name) from error
        except LedgerError as error:
            error.of(self.name)
            raise


def _resolve(ledger: str | Path) -> URL:
    if "://" not in str(ledger):
        return URL.create("sqlite", database=str(Path(ledger).expanduser().absolute()))
    try:
        url = make_url(str(ledger))
    except (ArgumentError, ValueError) as error:  # the second for a port that is no number
        shown = re.sub(r"//.*@", "//***@", str(ledger))
        raise LedgerMissing(f"{shown} is no path and no database URL") from error
    match url.get_backend_name():
        case "postgresql" | "postgres":  # libpq takes both, SQLAlchemy the first
            return url.set(drivername="postgresql+psycopg") if "+" not in url.drivername else url
        case "sqlite" if url.database and url.database != ":memory:" and not url.query:
            return _resolve(url.database)
        case "sqlite":
            raise LedgerMissing(f"{ledger} names no file; a ledger in memory would forget: use sqlite:///PATH")
        case other:
            raise LedgerForeign(f"a ledger is kept in SQLite or PostgreSQL, not in {other}")
