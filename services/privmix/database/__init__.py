"""Owns the connections to SQLite and PostgreSQL: time limits, encryption, locks, and one writer at a time.

Start at `database.py`. `backend.py` is the interface of a kind of database, with `sqlite.py` and `postgresql.py`;
`service.py` is the database of the keys, shares, usage and sizes of fleets; `schema.py`
creates tables. The tables of the ledger are in `privmix.budget.store`.
"""
