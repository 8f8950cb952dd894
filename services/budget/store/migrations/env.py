"""Alembic's environment script, which runs the revisions."""

from services.migrations import run

run()
