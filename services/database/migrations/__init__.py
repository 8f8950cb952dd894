"""Holds the Alembic revisions of the keys database. The rules are those in `services.budget.store.migrations`.

`services.database.service` applies them.
"""
