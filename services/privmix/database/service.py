"""Defines the database of the service: keys, shares, usage and sizes of fleets.

It is a SQLite file or a PostgreSQL database.

It is separate from the ledger: keys change and outlive ensembles, while a ledger belongs to one ensemble, has one
writer and is append-only. One PostgreSQL database can hold both, because the names of their tables differ.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Integer,
    MetaData,
    String,
    Table,
)

from privmix.database.backend import DatabaseUsage
from privmix.database.database import Database, shown, url_of
from privmix.database.schema import Schema
from privmix.foundation.errors import DatabaseConflict, DatabaseError, DatabaseMissing, KeysUnavailable

_KEYS = DatabaseUsage("the keys", lock=0x6B657973, connections=2)  # the lock is "keys" in ASCII

metadata = MetaData()

keys_table = Table(
    "privmix_keys",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("hash", String(64), nullable=False, unique=True),
    Column("previous_hash", String(64), index=True),
    Column("previous_until", String(40)),
    Column("created", String(40), nullable=False),
    Column("expires", String(40)),
    Column("revoked", String(40)),
    Column("tokens", BigInteger),
    Column("live_streams", BigInteger),
    Column("spent", BigInteger, nullable=False, default=0),
)

reservations_table = Table(
    "privmix_reservations",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("key", String(64), nullable=False, index=True),
    Column("tokens", BigInteger, nullable=False),
    Column("generations", BigInteger, nullable=False),
    Column("gateway", String(64), nullable=False),
)

# How many shards and copies an operator chose for each namespace: `privmix.fleet.size`.
fleets_table = Table(
    "privmix_fleets",
    metadata,
    Column("namespace", String(255), primary_key=True),
    Column("configured_shards", Integer, nullable=False),
    Column("configured_copies", Integer, nullable=False),
    Column("shards", Integer, nullable=False),
    Column("copies", Integer, nullable=False),
)

NUMBER_TABLE = "privmix_keys_schema"
_schema = Schema(metadata, NUMBER_TABLE, 3)


def default_database(ledger: str) -> str:
    """Returns the default database for a ledger: its PostgreSQL database, or `keys.db` in its directory."""
    url = url_of(ledger)
    return ledger if url.get_backend_name() != "sqlite" else str(Path(url.database or "").with_name("keys.db"))


class ServiceDatabase:
    """Opens the service's database at `place`, a path or a URL. Creates its tables.

    Args:
        create: create a file that does not exist.

    Attributes:
        name: the absolute path, or the URL without its password.

    Raises:
        KeysUnavailable: the database cannot be opened, or another version of privmix wrote it.
    """

    def __init__(self, place: str | Path, *, create: bool = True) -> None:
        self.name = shown(place)
        with self._errors():
            self._database = Database(place, "write", _KEYS)
            self.name = self._database.name
            new = Database(place, "create", _KEYS) if create else self._database
            with new.transaction() as connection:
                if not _schema.exists(connection):
                    _schema.create(connection)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Runs a transaction while no other process has one. It is on disk when the context exits.

        Raises:
            KeysUnavailable: the database failed.
            DatabaseConflict: a row violates a uniqueness constraint.
        """
        with self._errors(), self._database.transaction() as connection:
            yield connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except DatabaseConflict:
            raise
        except DatabaseMissing as error:
            raise KeysUnavailable(f"keys {self.name}: {error}. For a new service, run `privmix keys create`") from error
        except DatabaseError as error:
            raise KeysUnavailable(f"keys {self.name}: {error}") from error
