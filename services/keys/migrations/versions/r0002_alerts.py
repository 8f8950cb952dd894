"""Creates the tables of undelivered alerts and of the levels of alert conditions."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "privmix_alert_levels",
        sa.Column("namespace", sa.String(255), primary_key=True),
        sa.Column("levels", sa.Text, nullable=False),
    )
    op.create_table(
        "privmix_alerts",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=False),
        sa.Column("namespace", sa.String(255), nullable=False),
        sa.Column("receiver", sa.String(64), nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("created", sa.String(40), nullable=False),
    )
