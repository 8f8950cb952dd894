"""Creates the tables of keys, shares, usage and fleets."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "privmix_keys",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False, unique=True),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("group", sa.String(64)),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        sa.Column("hint", sa.String(16), nullable=False),
        sa.Column("previous_hash", sa.String(64), index=True),
        sa.Column("previous_until", sa.String(40)),
        sa.Column("created", sa.String(40), nullable=False),
        sa.Column("expires", sa.String(40)),
        sa.Column("revoked", sa.String(40)),
    )
    op.create_table(
        "privmix_shares",
        sa.Column("subject", sa.String(255), primary_key=True),
        sa.Column("share", sa.Text, nullable=False),
    )
    op.create_table(
        "privmix_usage",
        sa.Column("subject", sa.String(255), primary_key=True),
        sa.Column("day", sa.String(10), primary_key=True),
        sa.Column("spent", sa.BigInteger, nullable=False),
        sa.Column("held", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "privmix_reservations",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("subjects", sa.Text, nullable=False),
        sa.Column("day", sa.String(10), nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("generations", sa.BigInteger, nullable=False),
        sa.Column("gateway", sa.String(64), nullable=False),
    )
    op.create_table(
        "privmix_fleets",
        sa.Column("namespace", sa.String(255), primary_key=True),
        sa.Column("configured", sa.Integer, nullable=False),
        sa.Column("shards", sa.Integer, nullable=False),
    )
