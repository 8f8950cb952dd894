"""The one table of a ledger, as queries see it; `services.budget.migrations` makes it."""

from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, Text

ledger_table = Table(
    "privmix_ledger",
    MetaData(),
    Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("body", Text, nullable=False),
    Column("at", String(32), nullable=False),
    Column("previous", String(64), nullable=False),
    Column("hash", String(64), nullable=False),
)
