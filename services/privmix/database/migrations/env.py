"""Runs the revisions for Alembic."""

from privmix.database.upgrade import run

run()
