"""Opens the database of a ledger: one append-only table, in any of `BACKENDS`."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError

from services.budget.errors import LedgerError, LedgerForeign, LedgerMissing
from services.budget.store.backend import Backend
from services.budget.store.postgresql import PostgreSQL
from services.budget.store.schema import Access
from services.budget.store.sqlite import SQLite

_SQLITE = SQLite()
BACKENDS: tuple[Backend, ...] = (
    _SQLITE,
    PostgreSQL(),
)
"""Every kind of database that can store a ledger. A new backend needs one file and one line here."""


class Database:
    """The database at a path or a URL. The first transaction connects.

    Attributes:
        name: the absolute path, or the URL without its password.
    """

    def __init__(self, ledger: str | Path, access: Access) -> None:
        self._backend, url = _resolve(ledger)
        self.name = self._backend.label(url)
        self._engine = self._backend.engine(url, access)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Runs the block in one transaction, which is on disk when the block ends. A writer excludes other writers.

        Raises:
            LedgerError: the database failed, or the block raised it. The error names the ledger.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except DBAPIError as error:
            raise self._backend.explain(error).of(self.name) from error
        except LedgerError as error:
            error.of(self.name)
            raise


def _resolve(ledger: str | Path) -> tuple[Backend, URL]:
    if "://" not in str(ledger):
        return _SQLITE, _SQLITE.location(URL.create("sqlite", database=str(ledger)))
    try:
        url = make_url(str(ledger))
    except (ArgumentError, ValueError) as error:  # ValueError: the port is not a number
        shown = re.sub(r"//.*@", "//***@", str(ledger))
        raise LedgerMissing(f"{shown} is neither a path nor a database URL") from error
    schemes: Mapping[str, Backend] = {scheme: backend for backend in BACKENDS for scheme in backend.schemes}
    scheme = url.drivername.partition("+")[0]
    if scheme not in schemes:
        names = " or ".join(backend.name for backend in BACKENDS)
        raise LedgerForeign(f"a ledger must be in {names}, not in {scheme}")
    backend = schemes[scheme]
    return backend, backend.location(url)
