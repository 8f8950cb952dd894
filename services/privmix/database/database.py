"""Opens a database, in any of `BACKENDS`, with timeouts, encryption and one writer at a time."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from privmix.database.backend import Access, Backend, DatabaseUsage
from privmix.database.postgresql import PostgreSQL
from privmix.database.sqlite import SQLite
from privmix.foundation.errors import DatabaseConflict, DatabaseForeign, DatabaseMissing, DatabaseUnavailable

_SQLITE = SQLite()
BACKENDS: tuple[Backend, ...] = (
    _SQLITE,
    PostgreSQL(),
)
"""Every kind of database. A new backend needs one file and one line here."""


class Database:
    """The database at a path or a URL. The first transaction connects.

    Attributes:
        name: the absolute path, or the URL without its password.

    Raises:
        DatabaseError: the place cannot be a database.
    """

    def __init__(self, place: str | Path, access: Access, usage: DatabaseUsage) -> None:
        self._backend, url = _resolve(place, usage)
        self.name = self._backend.label(url)
        self._engine = self._backend.engine(url, access, usage)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Runs the block in one transaction, which is on disk when the block ends. A writer excludes other writers.

        Raises:
            DatabaseError: the database failed.
            DatabaseConflict: a row violates a constraint.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except IntegrityError as error:
            raise DatabaseConflict(_text(error)) from error
        except DBAPIError as error:
            raise self._backend.explain(error) from error
        except PoolTimeoutError as error:
            raise DatabaseUnavailable("all its connections are in use; try again") from error


def _text(error: DBAPIError) -> str:
    return " ".join(str(error.orig).split())


def _resolve(place: str | Path, usage: DatabaseUsage) -> tuple[Backend, URL]:
    if "://" not in str(place):
        return _SQLITE, _SQLITE.location(URL.create("sqlite", database=str(place)))
    try:
        url = make_url(str(place))
    except (ArgumentError, ValueError) as error:  # ValueError: the port is not a number
        shown = re.sub(r"//.*@", "//***@", str(place))
        raise DatabaseMissing(f"{shown} is neither a path nor a database URL") from error
    schemes: Mapping[str, Backend] = {scheme: backend for backend in BACKENDS for scheme in backend.schemes}
    scheme = url.drivername.partition("+")[0]
    if scheme not in schemes:
        names = " or ".join(backend.name for backend in BACKENDS)
        raise DatabaseForeign(f"{usage.name} must be in {names}, not in {scheme}")
    backend = schemes[scheme]
    return backend, backend.location(url)
