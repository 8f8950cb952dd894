"""Stores data in SQLite files."""

import sqlite3
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Engine, NullPool, QueuePool, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry

from privmix.database.backend import Access, Backend, DatabaseUsage
from privmix.foundation.errors import (
    DatabaseCorrupt,
    DatabaseError,
    DatabaseForeign,
    DatabaseMissing,
    DatabaseUnavailable,
)

BUSY_TIMEOUT = 30.0  # the maximum wait for another writer's transaction, in seconds

_ADVICE = {
    sqlite3.SQLITE_BUSY: "another process has locked it; try again",
    sqlite3.SQLITE_CANTOPEN: "check that it exists and that this user may open it",
    sqlite3.SQLITE_FULL: "free space on its disk",
    sqlite3.SQLITE_IOERR: "its disk is full or failing",
    sqlite3.SQLITE_READONLY: "this user must be able to write the file and its directory",
}

_UNSHARED = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)


class SQLite(Backend):
    """A SQLite file with a write-ahead log."""

    name = "SQLite"
    schemes = ("sqlite",)

    def location(self, url: URL) -> URL:
        if not url.database or url.database == ":memory:" or url.query:
            raise DatabaseMissing(f"{url} names no file, and data in memory would be lost; use sqlite:///PATH")
        return url.set(database=str(Path(url.database).expanduser().absolute()))

    def label(self, url: URL) -> str:
        return url.database or ""

    def engine(self, url: URL, access: Access, usage: DatabaseUsage) -> Engine:
        path, kept = Path(url.database or ""), access == "write" and usage.connections > 0
        pool: dict[str, Any] = (
            {"poolclass": QueuePool, "pool_size": usage.connections} if kept else {"poolclass": NullPool}
        )
        engine = create_engine("sqlite://", creator=lambda: _open_permitted(path, access, usage), **pool)
        # A removed or replaced file must be noticed and not written to. Without a pool, each transaction opens it anew.
        if kept:
            event.listen(engine, "connect", lambda _, record: record.info.update(file=_identity(path)))
            event.listen(engine, "checkout", lambda _, record, __: _check_kept(path, record))
        start = "BEGIN" if access == "read" else "BEGIN IMMEDIATE"
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(start))
        return engine

    def explain(self, error: DBAPIError) -> DatabaseError:
        code = getattr(error.orig, "sqlite_errorcode", -1) & 0xFF  # the low byte is the primary result code
        if code == sqlite3.SQLITE_NOTADB:
            return DatabaseForeign("this is not a SQLite file")
        if code == sqlite3.SQLITE_CORRUPT:
            return DatabaseCorrupt(f"{error.orig}; restore it from a backup")
        return DatabaseUnavailable(f"{error.orig}; {_ADVICE.get(code, 'check the file')}")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def _check_kept(path: Path, record: ConnectionPoolEntry) -> None:
    if record.info["file"] != _identity(path):
        raise DisconnectionError  # the pool connects again


def _open_permitted(path: Path, access: Access, usage: DatabaseUsage) -> sqlite3.Connection:
    try:
        return _open_file(path, access, usage)
    except PermissionError as error:
        raise DatabaseUnavailable(f"{error.strerror}; {_ADVICE[sqlite3.SQLITE_CANTOPEN]}") from error


def _open_file(path: Path, access: Access, usage: DatabaseUsage) -> sqlite3.Connection:
    if path.is_dir():
        raise DatabaseForeign("this is a directory; name a file in it")
    if not path.parent.is_dir():
        raise DatabaseMissing(f"there is no directory {path.parent}; create it, or choose another path")
    if access == "read" and not path.exists():
        raise DatabaseMissing("there is no such file; the service creates it at its first start")
    if access == "write" and not path.exists():
        raise DatabaseMissing("the file is missing; put it back, because a new one would forget what was spent")
    if access == "read":
        return _open_to_read(path)
    return _open_to_write(path, "rwc" if access == "create" else "rw", usage.table)


def _open_to_write(path: Path, mode: str, table: str | None) -> sqlite3.Connection:
    connection = _open(path, mode=mode)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    if table is not None and tables and table not in tables:
        raise DatabaseForeign(f"this is a database of another application; it has a table {tables[0]!r}")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = ON")
    (journal,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if journal != "wal":
        raise DatabaseUnavailable("its file system does not support shared memory between processes; use a local disk")
    return connection


def _open_to_read(path: Path) -> sqlite3.Connection:
    # mode=ro would leave the empty -wal and -shm files behind.
    connection = _open(path, mode="rw")
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA schema_version")
    except sqlite3.OperationalError as error:
        connection.close()
        if error.sqlite_errorcode & 0xFF not in _UNSHARED or path.with_name(path.name + "-wal").exists():
            raise
        # A reader without write access to the directory cannot create the shared memory. Without a write-ahead log,
        # the file contains everything and needs none.
        return _open(path, mode="ro", immutable="1")
    return connection


def _open(path: Path, **parameters: str) -> sqlite3.Connection:
    query = "&".join(f"{name}={value}" for name, value in parameters.items())
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?{query}",
        uri=True,
        timeout=BUSY_TIMEOUT,
        isolation_level=None,  # sqlite3 must not begin transactions by itself
        check_same_thread=False,  # the pool gives a connection to one thread at a time
    )
    # A damaged row that is not UTF-8 must fail its hash, which names the row, and not the whole query.
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
    return connection
