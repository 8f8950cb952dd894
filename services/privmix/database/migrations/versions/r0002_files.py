"""Separates the descriptions of files from their contents, which leave the database, and gives the database an id."""

from uuid import uuid4

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    service = op.create_table("privmix_service", sa.Column("id", sa.String(32), primary_key=True))
    op.bulk_insert(service, [{"id": uuid4().hex}])
    op.drop_index("ix_privmix_files_owner", "privmix_files")
    op.rename_table("privmix_files", "privmix_file_contents")
    op.create_table(
        "privmix_files",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(80), nullable=False, index=True),
        sa.Column("created", sa.BigInteger, nullable=False),
        sa.Column("expires", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
    )
    op.execute(
        "INSERT INTO privmix_files (id, owner, created, expires, bytes, record, state) "
        "SELECT id, owner, created, expires, bytes, record, 'stored' FROM privmix_file_contents"
    )
    op.add_column("privmix_batches", sa.Column("ended", sa.BigInteger))
