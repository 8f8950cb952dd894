"""Holds the Alembic revisions of the keys database. The rules are those in `privmix.budget.store.migrations`.

`privmix.database.service` applies them.
"""
