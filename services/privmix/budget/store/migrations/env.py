"""Alembic's environment script, which runs the revisions."""

from privmix.database.upgrade import run

run()
