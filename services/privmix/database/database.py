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

BACKENDS: tuple[Backend, ...] = (SQLite(), PostgreSQL())
"""Every kind of database. A new backend needs one file and one line here."""

_CONNECTION_STRING = re.compile(
    r"(?:^|/)(?:host|hostaddr|dbname|service)=[^/]*$|\s(?:host|hostaddr|port|dbname|user|password|sslmode|service)="
)
"""Finds libpq's other form, `host=... dbname=...`, which would be the name of a new SQLite file."""


class Database:
    """The database at a path or a URL. The first transaction connects.

    Attributes:
        name: the absolute path, or the URL without its password.

    Raises:
        DatabaseError: the place cannot be a database.
    """

    def __init__(self, place: str | Path, access: Access, usage: DatabaseUsage) -> None:
        url = url_of(place)
        self._backend = _backend(url, usage)
        url = self._backend.location(url)
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


def shown(place: str | Path) -> str:
    """Returns a path or a URL without what may be a password."""
    return "***" if _CONNECTION_STRING.search(str(place)) else re.sub(r"//.*@", "//***@", str(place))


def url_of(place: str | Path) -> URL:
    """Returns the URL of a path, which is that of a SQLite file, or of a URL. Connects to nothing.

    Raises:
        DatabaseError: the place is neither. The message shows no password.
    """
    text = str(place)
    if _CONNECTION_STRING.search(text):
        raise DatabaseForeign(
            "a connection string is no place of a database; write a URL: postgresql://USER:PASSWORD@HOST/DATABASE"
        )
    if "://" not in text:
        return URL.create("sqlite", database=text)
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:  # ValueError: the port is not a number
        raise DatabaseMissing(f"{shown(text)} is neither a path nor a database URL; correct it") from error
    # What follows the first @ of a password would be taken for the host, which messages show.
    if url.get_backend_name() != "sqlite" and text.count("@") > 1:
        raise DatabaseForeign("the URL has more than one @: write %40 for an @ in its user or password")
    return url


def _backend(url: URL, usage: DatabaseUsage) -> Backend:
    schemes: Mapping[str, Backend] = {scheme: backend for backend in BACKENDS for scheme in backend.schemes}
    scheme = url.get_backend_name()
    if scheme not in schemes:
        names = " or ".join(backend.name for backend in BACKENDS)
        raise DatabaseForeign(f"{usage.name} must be in {names}, not in {scheme}")
    return schemes[scheme]
