"""Creates the tables of uploaded files and batches."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "privmix_files",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(80), nullable=False, index=True),
        sa.Column("created", sa.BigInteger, nullable=False),
        sa.Column("expires", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "privmix_batches",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(80), nullable=False, index=True),
        sa.Column("created", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("output_expires_s", sa.BigInteger),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_table(
        "privmix_batch_lines",
        sa.Column("batch", sa.String(64), primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("goes_to", sa.String(8)),
        sa.Column("result", sa.Text),
        sa.Column("prompt_tokens", sa.BigInteger),
        sa.Column("completion_tokens", sa.BigInteger),
    )
