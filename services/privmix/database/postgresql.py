"""Stores data in PostgreSQL."""

import os
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Dialect, Engine, NullPool, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry

from privmix.database.backend import Access, Backend, DatabaseUsage
from privmix.foundation.errors import DatabaseError, DatabaseUnavailable, ExtraMissing

LOCK_TIMEOUT = "30s"  # the maximum wait for another writer's transaction
IDLE_TIMEOUT = "10s"  # the server ends a transaction of a writer that is idle for this long
STATEMENT_TIMEOUT = "40s"  # the server ends a writer's statement that takes longer, including its wait for a lock

# `client_encoding`: psycopg 3.3 returns bytes for text of a database in SQL_ASCII otherwise.
# `prepare_threshold`: a pooler in transaction mode gives the next statement another session, without what was prepared.
# The client gives up a network that is cut after about 30 seconds, and a server that hangs after
# `limited_connection.SILENCE_S`. Parameters in the URL take precedence.
_LINK = {
    "client_encoding": "utf8",
    "prepare_threshold": None,
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")

# https://www.postgresql.org/docs/current/errcodes-appendix.html
_ADVICE = {
    None: "check that the server runs and that the URL is correct",
    "25006": "this server is read-only, for example a standby; use the URL of the primary",
    "42501": "grant this user SELECT and INSERT on privmix's tables, and CREATE for the first start",
    "53100": "free space on the server's disk",
    "55P03": "another writer has locked it, or its commit waits for a synchronous standby; try again",
    "57014": "the server is overloaded; try again",
}


class PostgreSQL(Backend):
    """A PostgreSQL database. An advisory lock excludes other writers, like SQLite's own lock."""

    name = "PostgreSQL"
    schemes = ("postgresql", "postgres")

    def location(self, url: URL) -> URL:
        return url.set(drivername="postgresql+psycopg")

    def engine(self, url: URL, access: Access, usage: DatabaseUsage) -> Engine:
        link = {name: value for name, value in (_LINK | _encryption(url)).items() if name not in url.query}
        connections = max(1, usage.connections)
        pool = {"pool_size": connections, "pool_pre_ping": True} if access == "write" else {"poolclass": NullPool}
        try:
            # READ COMMITTED: statements after the lock's statement see everything committed before it.
            engine = create_engine(url, isolation_level="READ COMMITTED", connect_args=link, **pool)
        except ModuleNotFoundError as error:
            raise DatabaseUnavailable(f"{url} {ExtraMissing.of(error) or error}") from error
        event.listen(engine, "do_connect", _connect)
        if access == "read":
            return engine.execution_options(postgresql_readonly=True)
        event.listen(engine, "connect", _require_fsync)
        event.listen(engine, "begin", lambda connection: _begin_exclusive(connection, usage.lock))
        return engine

    def explain(self, error: DBAPIError) -> DatabaseError:
        advice = _ADVICE.get(getattr(error.orig, "sqlstate", None), "check the database")
        if "does not support SSL" in str(error.orig):
            advice = "set up TLS on the server; add sslmode=disable to the URL only on a trusted network"
        return DatabaseUnavailable(f"{' '.join(str(error.orig).split())}; {advice}")


def _encryption(url: URL) -> dict[str, str]:
    """Requires TLS over a network, unless the URL or libpq's PGSSLMODE sets it. libpq has no TLS on a Unix socket.

    To verify the server's certificate, set `sslmode=verify-full` and the root certificate in the URL.
    """
    return {} if url.host in _THIS_MACHINE or "PGSSLMODE" in os.environ else {"sslmode": "require"}


def _connect(_: Dialect, __: ConnectionPoolEntry, arguments: Sequence[Any], parameters: dict[str, Any]) -> Any:
    # It needs psycopg, which only an extra installs.
    from privmix.database.limited_connection import LimitedConnection

    return LimitedConnection.connect(*arguments, **parameters)


def _require_fsync(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    cursor.execute("SHOW fsync")
    fsync = cursor.fetchall()[0][0]
    cursor.close()
    connection.rollback()
    if fsync != "on":
        raise DatabaseUnavailable("the server runs with fsync = off and may lose committed charges; set fsync = on")


def _begin_exclusive(connection: Connection, lock: int) -> None:
    connection.exec_driver_sql(
        "SELECT set_config('synchronous_commit', 'on', true), "
        f"set_config('lock_timeout', '{LOCK_TIMEOUT}', true), "
        f"set_config('idle_in_transaction_session_timeout', '{IDLE_TIMEOUT}', true), "
        f"set_config('statement_timeout', '{STATEMENT_TIMEOUT}', true)"
    )
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({lock})")
