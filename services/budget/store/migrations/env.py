"""Alembic's environment script, which runs the revisions."""

from services.database.upgrade import run

run()
