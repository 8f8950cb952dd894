"""Defines the schema of a ledger, and checks and migrates the schema of a database."""

from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, String, Table, Text, inspect

from privmix.database.upgrade import Migrations
from privmix.foundation.errors import LedgerForeign, LedgerMissing

REVISION_TABLE = "privmix_ledger_revision"  # not Alembic's default, because other applications may use that one here

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

# The epoch of the writer, and the Unix time of its last heartbeat by the database's own clock.
beat_table = Table(
    "privmix_ledger_beat",
    ledger_table.metadata,
    Column("epoch", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("beat", BigInteger, nullable=False),
)

_WITHOUT_REVISION = f"its schema has no revision: restore the table {REVISION_TABLE} from the backup that it came from"
_migrations = Migrations("privmix.budget.store:migrations", REVISION_TABLE)


def has_ledger(connection: Connection) -> bool:
    """Tells whether the ledger's table exists, empty or not."""
    return inspect(connection).has_table(ledger_table.name)


def check(connection: Connection) -> None:
    """Checks that this version can read the ledger. Writes nothing.

    Raises:
        LedgerMissing: there has never been a ledger.
        LedgerForeign: the database belongs to another application, lacks its ledger table, or has an unknown schema.
    """
    revision = _migrations.revision(connection)
    if has_ledger(connection):
        if revision is None:
            raise LedgerForeign(_WITHOUT_REVISION)
        return
    # A SQLite file belongs to one application; a PostgreSQL database may belong to several.
    if connection.dialect.name == "sqlite" and inspect(connection).get_table_names():
        raise LedgerForeign("there is no privmix ledger in this file; it is a database of another application")
    if revision is None:
        raise LedgerMissing("there is no privmix ledger in this database; the service creates it at its first start")
    raise LedgerForeign("its table is missing; put it back, because a new one would forget what was spent")


def migrate(connection: Connection, *, create: bool) -> bool:
    """Upgrades the schema in the caller's transaction; with `create`, creates a missing one. Tells whether it created.

    Raises:
        LedgerForeign: this version does not know the schema, or it has no revision.
    """
    revision, exists = _migrations.revision(connection), has_ledger(connection)
    if exists and revision is None:
        raise LedgerForeign(_WITHOUT_REVISION)
    # A revision without its table means that somebody deleted a ledger. A new one would forget what was spent.
    created = create and not exists and revision is None
    if not exists and not created:
        return False
    _migrations.upgrade(connection)
    return created
