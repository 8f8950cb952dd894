"""Runs the revisions for Alembic."""

from services.database.upgrade import run

run()
