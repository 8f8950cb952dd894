"""Runs the revisions for Alembic."""

from privmix.services.database.upgrade import run

run()
