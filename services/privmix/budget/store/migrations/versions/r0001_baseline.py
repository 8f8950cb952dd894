"""Creates the ledger's table, triggers that allow only appends, and the table of the writer's heartbeat.

The heartbeat's table is the only one that is overwritten; it has no budget data.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_REFUSAL = "the privmix ledger is append-only"
_SQLITE_TRIGGER = (
    "CREATE TRIGGER privmix_ledger_{0} BEFORE {0} ON privmix_ledger {1} BEGIN SELECT RAISE(ABORT, '{2}'); END"
)
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


def upgrade() -> None:
    op.create_table(
        "privmix_ledger",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("at", sa.String(32), nullable=False),
        sa.Column("previous", sa.String(64), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
    )
    op.create_table(
        "privmix_ledger_beat",
        sa.Column("epoch", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=False),
        sa.Column("beat", sa.BigInteger, nullable=False),
    )
    connection = op.get_bind()
    for guard in _GUARDS[connection.dialect.name]:
        connection.exec_driver_sql(guard)
