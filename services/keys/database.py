"""Defines the database of the service: keys, shares, usage, alerts, batches and the list of ensembles.

It is a SQLite file or a PostgreSQL database.

It is separate from the ledger: keys change and outlive ensembles, while a ledger belongs to one ensemble, has one
writer and is append-only. One PostgreSQL database can hold both, because the names of their tables differ.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    inspect,
    make_url,
)
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.pool import ConnectionPoolEntry

from services.keys.records import KeysUnavailable
from services.migrations import Migrations, UnknownRevision

ADVISORY_LOCK = 0x6B657973  # "keys" in ASCII. Allows one writer at a time, as in SQLite.
BUSY_TIMEOUT_S = 30

REVISION_TABLE = "privmix_keys_revision"
BEFORE_REVISIONS = "0001"  # the schema of databases from before revisions were recorded
migrations = Migrations("services.keys:migrations", REVISION_TABLE)

metadata = MetaData()

keys_table = Table(
    "privmix_keys",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("owner", String(128), nullable=False),
    Column("group", String(64)),
    Column("scopes", Text, nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Column("hint", String(16), nullable=False),
    Column("previous_hash", String(64), index=True),
    Column("previous_until", String(40)),
    Column("created", String(40), nullable=False),
    Column("expires", String(40)),
    Column("revoked", String(40)),
)

shares_table = Table(
    "privmix_shares",
    metadata,
    Column("subject", String(255), primary_key=True),
    Column("share", Text, nullable=False),
)

usage_table = Table(
    "privmix_usage",
    metadata,
    Column("subject", String(255), primary_key=True),
    Column("day", String(10), primary_key=True),
    Column("spent", BigInteger, nullable=False, default=0),
    Column("held", BigInteger, nullable=False, default=0),
)

reservations_table = Table(
    "privmix_reservations",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("subjects", Text, nullable=False),
    Column("day", String(10), nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("generations", BigInteger, nullable=False),
    Column("gateway", String(64), nullable=False),
)

# `levels` is `services.alerts.conditions.Conditions.levels` as JSON.
alert_levels_table = Table(
    "privmix_alert_levels",
    metadata,
    Column("namespace", String(255), primary_key=True),
    Column("levels", Text, nullable=False),
)

alerts_table = Table(
    "privmix_alerts",
    metadata,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("namespace", String(255), nullable=False),
    Column("receiver", String(64), nullable=False),
    Column("id", String(64), nullable=False),
    Column("body", Text, nullable=False),
    Column("created", String(40), nullable=False),
)

# `record` is `services.batches.records.File` as JSON; `created` is in Unix microseconds, `expires` in Unix seconds.
files_table = Table(
    "privmix_files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("owner", String(80), nullable=False, index=True),
    Column("created", BigInteger, nullable=False),
    Column("expires", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("record", Text, nullable=False),
    Column("content", LargeBinary, nullable=False),
)

# `record` is `services.batches.records.Batch` as JSON; `created` is in Unix microseconds.
batches_table = Table(
    "privmix_batches",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("owner", String(80), nullable=False, index=True),
    Column("created", BigInteger, nullable=False),
    Column("status", String(16), nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("output_expires_s", BigInteger),
    Column("record", Text, nullable=False),
)

# Holds the lines of open batches that were started; `goes_to` is set once a line is answered.
batch_lines_table = Table(
    "privmix_batch_lines",
    metadata,
    Column("batch", String(64), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("attempts", BigInteger, nullable=False),
    Column("goes_to", String(8)),
    Column("result", Text),
    Column("prompt_tokens", BigInteger),
    Column("completion_tokens", BigInteger),
)


# `listed` is a list of `services.ensembles.records.EnsembleEntry` as JSON.
ensembles_table = Table(
    "privmix_ensembles",
    metadata,
    Column("namespace", String(255), primary_key=True),
    Column("listed", Text, nullable=False),
)

# The number of shards that an operator chose for each ensemble: `services.fleet.size`.
fleets_table = Table(
    "privmix_fleets",
    metadata,
    Column("namespace", String(255), primary_key=True),
    Column("configured", Integer, nullable=False),
    Column("shards", Integer, nullable=False),
)


def default_database(ledger: str) -> str:
    """Returns the default database for a ledger: its PostgreSQL database, or `keys.db` in its directory."""
    if "://" not in ledger:
        return str(Path(ledger).with_name("keys.db"))
    url = make_url(ledger)
    return ledger if url.get_backend_name() != "sqlite" else str(Path(url.database or "").with_name("keys.db"))


class Database:
    """Opens the database at `place`, a path or a URL. Creates its tables or migrates them to the newest revision.

    Raises:
        KeysUnavailable: the database cannot be opened, or a later version of privmix wrote it.
    """

    def __init__(self, place: str | Path, *, create: bool = True) -> None:
        url = _resolve(str(place))
        self.name = str(url) if url.get_backend_name() != "sqlite" else url.database or ""
        if url.get_backend_name() == "sqlite":
            self._check_file(create)
        self._engine = _engine(url)
        with self.transaction() as connection:
            old = inspect(connection).has_table(keys_table.name)
            try:
                migrations.upgrade(connection, start=BEFORE_REVISIONS if old else None)
            except UnknownRevision as error:
                raise KeysUnavailable(f"keys {self.name}: {error}") from error

    def _check_file(self, create: bool) -> None:
        if not Path(self.name).parent.is_dir():
            raise KeysUnavailable(f"keys {self.name}: its directory does not exist; create it or name another path")
        if not create and not Path(self.name).exists():
            raise KeysUnavailable(f"keys {self.name}: this file does not exist; `privmix keys create` creates it")

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Runs a transaction while no other process has one. It is on disk when the context exits.

        Raises:
            KeysUnavailable: the database failed.
            IntegrityError: a row violates a uniqueness constraint.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except IntegrityError:
            raise
        except DBAPIError as error:
            raise KeysUnavailable(f"keys {self.name}: {' '.join(str(error.orig).split())}") from error


def _resolve(place: str) -> URL:
    if "://" not in place:
        return URL.create("sqlite", database=str(Path(place).expanduser().absolute()))
    try:
        url = make_url(place)
    except (ArgumentError, ValueError) as error:
        raise KeysUnavailable("keys: give a path or a database URL") from error
    match url.get_backend_name():
        case "postgresql" | "postgres":
            return url.set(drivername="postgresql+psycopg") if "+" not in url.drivername else url
        case "sqlite" if url.database and url.database != ":memory:":
            return _resolve(url.database)
        case other:
            raise KeysUnavailable(f"keys: use a SQLite file or PostgreSQL; {other} is not supported")


def _engine(url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False})
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        return engine
    engine = create_engine(url, isolation_level="READ COMMITTED", pool_pre_ping=True, pool_size=2)
    lock = f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})"
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(lock))
    return engine


def _prepare_sqlite(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    assert isinstance(connection, sqlite3.Connection)
    connection.isolation_level = None  # The "begin" event starts transactions; the driver must not.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
