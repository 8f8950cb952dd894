"""Runs the revisions for Alembic."""

from services.migrations import run

run()
