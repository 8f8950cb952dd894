"""What Alembic runs around the revisions."""

from services.migrations import run

run()
