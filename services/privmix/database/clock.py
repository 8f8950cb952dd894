"""Tells the time: by the database's clock, which all its clients share, and by this machine's."""

from datetime import UTC, datetime

from sqlalchemy import BigInteger, ColumnClause, Connection, literal_column

_NOW = {
    "sqlite": "CAST(strftime('%s', 'now') AS INTEGER)",
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) AS BIGINT)",
}


def unix_time(connection: Connection) -> ColumnClause[int]:
    """Returns the Unix time in seconds, as an expression."""
    return literal_column(_NOW[connection.dialect.name], BigInteger)


def now() -> datetime:
    """Returns the current time of this machine, in UTC."""
    return datetime.now(UTC)
