"""Alembic revisions of a ledger's schema. The package contains them; `privmix.budget.store.schema` applies
them.

A new revision is a file in `versions` that names its predecessor as its `down_revision`. A released revision is never
edited. There are no downgrades, because rows are never deleted.
"""
