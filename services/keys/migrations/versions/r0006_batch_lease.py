"""The lease of the deployment that runs the batches."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "privmix_batch_lease",
        sa.Column("holder", sa.String(64), primary_key=True),
        sa.Column("until", sa.BigInteger, nullable=False),
    )
