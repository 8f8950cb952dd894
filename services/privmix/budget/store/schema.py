"""Defines the tables of a ledger, creates them, and checks those of a database."""

from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, String, Table, Text, inspect

from privmix.database.schema import Schema
from privmix.foundation.errors import LedgerForeign, LedgerMissing

NUMBER_TABLE = "privmix_ledger_schema"

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

# The epoch of the writer, and the Unix time of its last heartbeat by the database's own clock. It alone is overwritten,
# and has nothing of the budget.
beat_table = Table(
    "privmix_ledger_beat",
    ledger_table.metadata,
    Column("epoch", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("beat", BigInteger, nullable=False),
)

_schema = Schema(ledger_table.metadata, NUMBER_TABLE, 1)

_REFUSAL = "the privmix ledger is append-only"
_SQLITE_TRIGGER = (
    "CREATE TRIGGER privmix_ledger_{0} BEFORE {0} ON privmix_ledger {1} BEGIN SELECT RAISE(ABORT, '{2}'); END"
)
# Triggers that allow only appends.
_GUARDS = {
    "sqlite": (
        _SQLITE_TRIGGER.format("UPDATE", "", _REFUSAL),
        _SQLITE_TRIGGER.format("DELETE", "", _REFUSAL),
        # INSERT OR REPLACE would delete a row without firing the trigger above.
        _SQLITE_TRIGGER.format(
            "INSERT", "WHEN NEW.seq <> (SELECT coalesce(max(seq), 0) + 1 FROM privmix_ledger)", _REFUSAL
        ),
    ),
    "postgresql": (
        "CREATE FUNCTION privmix_ledger_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{_REFUSAL}'; END $$",
        "CREATE TRIGGER privmix_ledger_change BEFORE UPDATE OR DELETE OR TRUNCATE ON privmix_ledger "
        "FOR EACH STATEMENT EXECUTE FUNCTION privmix_ledger_refuse()",
    ),
}


def exists(connection: Connection) -> bool:
    """Returns whether the database has a ledger. Writes nothing.

    Raises:
        LedgerForeign: the database belongs to another application, has a ledger of another layout, or lost a table.
    """
    numbered = _schema.exists(connection)
    if inspect(connection).has_table(ledger_table.name):
        if not numbered:
            raise LedgerForeign(f"its layout is unknown: restore the table {NUMBER_TABLE} from a backup of it")
        return True
    # A SQLite file belongs to one application; a PostgreSQL database may belong to several.
    if not numbered and connection.dialect.name == "sqlite" and inspect(connection).get_table_names():
        raise LedgerForeign("there is no privmix ledger in this file; it is a database of another application")
    if numbered:
        raise LedgerForeign("its table is missing; put it back, because a new one would forget what was spent")
    return False


def check(connection: Connection) -> None:
    """Checks that the database has a ledger. Writes nothing.

    Raises:
        LedgerMissing: it never had one.
        LedgerForeign: see `exists`.
    """
    if not exists(connection):
        raise LedgerMissing("there is no privmix ledger in this database; the service creates it at its first start")


def create(connection: Connection) -> bool:
    """Creates the tables of a ledger in the caller's transaction, unless there is one. Returns whether it did.

    Raises:
        LedgerForeign: see `exists`.
    """
    if exists(connection):
        return False
    _schema.create(connection)
    for guard in _GUARDS[connection.dialect.name]:
        connection.exec_driver_sql(guard)
    return True
