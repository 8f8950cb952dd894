"""Creates the table of the writer's heartbeat. It is the only table that is overwritten; it has no budget data."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "privmix_ledger_beat",
        sa.Column("epoch", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=False),
        sa.Column("beat", sa.BigInteger, nullable=False),
    )
