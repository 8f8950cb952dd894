"""Creates the table of ensembles, and widens subjects for shares of one ensemble."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "privmix_ensembles",
        sa.Column("namespace", sa.String(255), primary_key=True),
        sa.Column("listed", sa.Text, nullable=False),
    )
    for table in ("privmix_shares", "privmix_usage"):
        with op.batch_alter_table(table) as rows:  # SQLite changes a column by copying the table
            rows.alter_column("subject", type_=sa.String(255), existing_type=sa.String(80), existing_nullable=False)
