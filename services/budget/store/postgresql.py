"""Ledgers in PostgreSQL."""

import os

from sqlalchemy import Connection, Engine, NullPool, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry

from services.budget.errors import LedgerError, LedgerUnavailable
from services.budget.store.backend import Backend
from services.budget.store.schema import Access

ADVISORY_LOCK = 0x707269766D6978  # "privmix": the stand-in for SQLite's one-writer lock
LOCK_TIMEOUT = "30s"  # to wait for another writer's transaction
IDLE_TIMEOUT = "10s"  # after which the server ends the transaction of a writer whose machine has gone silent

# A server that has gone silent is given up in half a minute; what the URL says about these stands.
_LINK = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")

# https://www.postgresql.org/docs/current/errcodes-appendix.html
_ADVICE = {
    None: "check that the server runs and that the URL is right",
    "25006": "this server only reads, as a standby does; name the one that writes",
    "42501": "this user must be able to read the ledger's tables and insert into them, and to make them at first",
    "53100": "make room on the server's disk",
    "55P03": "another writer holds it; try again",
}


class PostgreSQL(Backend):
    """A PostgreSQL database. An advisory lock keeps other writers out, as SQLite's own lock does."""

    name = "PostgreSQL"
    schemes = ("postgresql", "postgres")

    def location(self, url: URL) -> URL:
        return url if "+" in url.drivername else url.set(drivername="postgresql+psycopg")

    def engine(self, url: URL, access: Access) -> Engine:
        link = {name: value for name, value in (_LINK | _encryption(url)).items() if name not in url.query}
        pool = {"pool_size": 1, "pool_pre_ping": True} if access == "write" else {"poolclass": NullPool}
        try:
            # The lock is taken in a statement of its own, so the statements after it see what is committed by then.
            engine = create_engine(url, isolation_level="READ COMMITTED", connect_args=link, **pool)
        except ModuleNotFoundError as error:
            raise LedgerUnavailable(f"{url} needs the package {error.name}; install it") from error
        if access == "read":
            return engine.execution_options(postgresql_readonly=True)
        event.listen(engine, "connect", _demand_a_disk)
        # Making or moving a ledger reads all of it between two statements.
        idle = IDLE_TIMEOUT if access == "write" else "0"
        event.listen(engine, "begin", lambda connection: _begin_alone(connection, idle))
        return engine

    def explain(self, error: DBAPIError) -> LedgerError:
        advice = _ADVICE.get(getattr(error.orig, "sqlstate", None), "look at the database")
        if "does not support SSL" in str(error.orig):
            advice = (
                "set up TLS there; only where the network between is trusted, add sslmode=disable to the ledger's URL"
            )
        return LedgerUnavailable(f"{' '.join(str(error.orig).split())}; {advice}")


def _encryption(url: URL) -> dict[str, str]:
    """TLS over a network, unless the URL or libpq's own PGSSLMODE says otherwise; libpq uses none over a Unix socket.

    `sslmode=verify-full` also demands the server's certificate, and is for the URL, which names the root's.
    """
    return {} if url.host in _THIS_MACHINE or "PGSSLMODE" in os.environ else {"sslmode": "require"}


def _demand_a_disk(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    cursor.execute("SHOW fsync")
    fsync = cursor.fetchall()[0][0]
    cursor.close()
    connection.rollback()
    if fsync != "on":
        raise LedgerUnavailable("the server runs with fsync = off and may forget what it has confirmed; turn it on")


def _begin_alone(connection: Connection, idle: str) -> None:
    connection.exec_driver_sql(
        "SELECT set_config('synchronous_commit', 'on', true), "
        f"set_config('lock_timeout', '{LOCK_TIMEOUT}', true), "
        f"set_config('idle_in_transaction_session_timeout', '{idle}', true)"
    )
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})")
