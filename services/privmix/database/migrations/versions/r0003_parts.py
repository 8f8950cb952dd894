"""Adds the part of an answered line, which has its result outside the database."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("privmix_batch_lines", sa.Column("part", sa.String(64)))
    op.create_index("ix_privmix_batch_lines_part", "privmix_batch_lines", ["part"])
