"""Alembic's environment script, which runs the revisions."""

from privmix.services.database.upgrade import run

run()
