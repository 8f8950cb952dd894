"""The number of shards that an operator chose for each ensemble."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "privmix_fleets",
        sa.Column("namespace", sa.String(255), primary_key=True),
        sa.Column("configured", sa.Integer, nullable=False),
        sa.Column("shards", sa.Integer, nullable=False),
    )
