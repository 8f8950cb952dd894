"""Owns the tables of a ledger. Start at `schema.py`; `rows.py` reads and appends records, `database.py` opens it."""
