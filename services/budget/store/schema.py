"""The schema of a ledger: its tables as queries see them, the revision that a database has, and migration."""

from typing import Literal

from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, String, Table, Text, inspect

from services.budget.errors import LedgerForeign, LedgerMissing
from services.migrations import Migrations, UnknownRevision

Access = Literal["read", "write", "create"]
"""What a database is opened for."""

REVISION_TABLE = "privmix_ledger_revision"  # of its own, because others may share the database and use Alembic too
BEFORE_REVISIONS = "0001"  # the layout of ledgers that were made before revisions were recorded

ledger_table = Table(
    "privmix_ledger",
    MetaData(),
    Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("body", Text, nullable=False),
    Column("at", String(32), nullable=False),
    Column("previous", String(64), nullable=False),
    Column("hash", String(64), nullable=False),
)

# The epoch of the writer and the second, by the database's own clock, at which it was last known to live.
beat_table = Table(
    "privmix_ledger_beat",
    ledger_table.metadata,
    Column("epoch", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("beat", BigInteger, nullable=False),
)

_migrations = Migrations("services.budget.store:migrations", REVISION_TABLE)


def has_ledger(connection: Connection) -> bool:
    """Whether there is a ledger's table, empty or not."""
    return inspect(connection).has_table(ledger_table.name)


def check(connection: Connection) -> None:
    """Makes sure that this version can read what is there; writes nothing.

    Raises:
        LedgerMissing: there has never been a ledger.
        LedgerForeign: this is something else's, or its table is gone, or of a layout that this version does not know.
    """
    revision = _revision(connection)
    if has_ledger(connection):
        return
    # A SQLite file is a ledger's or another's; in a PostgreSQL database many may live.
    if connection.dialect.name == "sqlite" and inspect(connection).get_table_names():
        raise LedgerForeign("there is no privmix ledger in this file, which is a database of something else")
    if revision is None:
        raise LedgerMissing("there is no privmix ledger in this database; the service makes it when it first starts")
    raise LedgerForeign("the table of its ledger is gone; put it back, because a new one would forget what was spent")


def migrate(connection: Connection, *, create: bool) -> bool:
    """Brings the layout up to date, in the caller's transaction, and with `create` makes it; says whether it did.

    Raises:
        LedgerForeign: the layout is one that this version does not know.
    """
    revision, there = _revision(connection), has_ledger(connection)
    # A revision without its table is no place to start anew: someone removed a ledger there.
    made = create and not there and revision is None
    if not there and not made:
        return False
    _migrations.upgrade(connection, start=BEFORE_REVISIONS if there else None)
    return made


def _revision(connection: Connection) -> str | None:
    try:
        return _migrations.revision(connection)
    except UnknownRevision as error:
        raise LedgerForeign(str(error)) from error
