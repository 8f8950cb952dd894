"""What Alembic runs around the revisions: inside the caller's connection and transaction."""

from alembic import context

from services.budget.store.schema import REVISION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=REVISION_TABLE)
context.run_migrations()
