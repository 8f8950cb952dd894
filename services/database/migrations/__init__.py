"""Holds the Alembic revisions of the keys database. The rules are those in `privmix.services.budget.store.migrations`.

`privmix.services.database.service` applies them.
"""
