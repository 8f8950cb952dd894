"""Alembic's revisions of a ledger's layout. They travel with the package; `services.budget.store.schema` applies them.

A new one is a file in `versions` that names the one before as its `down_revision`. Revisions are never edited once
released, and none has a way down: rows are never given up.
"""
