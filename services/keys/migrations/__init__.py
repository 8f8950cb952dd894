"""Alembic's revisions of the keys' database, as those of a ledger: `services.budget.store.migrations` has the rules.

`services.keys.database` applies them.
"""
