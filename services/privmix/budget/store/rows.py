"""Reads and appends rows of a ledger's table, inside the caller's transaction."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from sqlalchemy import BigInteger, ColumnClause, Connection, delete, insert, literal_column, select

from privmix.budget.chain import LedgerRow, link, verified
from privmix.budget.records import Checkpoint, Record
from privmix.budget.store import schema
from privmix.budget.store.schema import beat_table, ledger_table

_BATCH = 10_000
_NOW = {
    "sqlite": "CAST(strftime('%s', 'now') AS INTEGER)",
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) AS BIGINT)",
}


def rows(connection: Connection, since: int = 1, until: int | None = None) -> Iterator[LedgerRow]:
    """Returns the rows from number `since` to number `until`, in order; to the last one by default."""
    query = select(ledger_table).where(ledger_table.c.seq >= since).order_by(ledger_table.c.seq)
    if until is not None:
        query = query.where(ledger_table.c.seq <= until)
    return map(LedgerRow._make, connection.execute(query, execution_options={"yield_per": _BATCH}))


def is_linked(connection: Connection, earlier: tuple[int, str], later: tuple[int, str]) -> bool:
    """Returns whether the chain that ends with the row `later` contains the row `earlier`, each a number and a hash.

    The hashes of the rows between them show it. Somebody who writes to the database chooses its answers, and not these.

    Raises:
        LedgerCorrupt: a row between them is missing or was changed.
    """
    if earlier[0] >= later[0]:
        return earlier == later
    between = rows(connection, earlier[0], later[0])
    first = next(between, None)
    if first is None or (first.seq, first.hash) != earlier:
        return False
    last = deque(verified(between, first), maxlen=1)
    return [(row.seq, row.hash) for row in last] == [later]


def every_row(connection: Connection) -> Iterator[LedgerRow]:
    """Returns all rows, unverified.

    Raises:
        LedgerMissing: there has never been a ledger.
        LedgerForeign: this is not a ledger, or has an unknown schema.
    """
    schema.check(connection)
    return rows(connection)


def last_checkpoint(connection: Connection) -> int | None:
    """Returns the number of the newest checkpoint, or None."""
    newest_first = select(ledger_table.c.seq).order_by(ledger_table.c.seq.desc())
    query = newest_first.where(ledger_table.c.kind == Checkpoint.kind).limit(1)
    seq: int | None = connection.execute(query).scalar()
    return seq


def append(connection: Connection, rows: Sequence[LedgerRow]) -> None:
    """Writes rows that follow the last row. The caller holds the ledger's lock and has verified all earlier rows."""
    if rows:
        connection.execute(insert(ledger_table), [row._asdict() for row in rows])


def write_beat(connection: Connection, epoch: int) -> None:
    """Records a heartbeat of the writer of this epoch."""
    connection.execute(delete(beat_table).where(beat_table.c.epoch <= epoch))
    connection.execute(insert(beat_table).values(epoch=epoch, beat=_unix_time(connection)))


def end_epoch(connection: Connection, epoch: int) -> None:
    """Records that the writer of this epoch has ended."""
    connection.execute(delete(beat_table).where(beat_table.c.epoch == epoch))


def silence_s(connection: Connection, epoch: int) -> float:
    """Returns the seconds since the last heartbeat of the writer of this epoch; infinite if it has ended."""
    age = connection.execute(
        select(_unix_time(connection) - beat_table.c.beat).where(beat_table.c.epoch == epoch)
    ).scalar()
    return math.inf if age is None else float(age)


def following(head: LedgerRow | None, epoch: int, record: Record) -> LedgerRow:
    """Builds the row that follows `head`, or the first row, and does not write it."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return link(head, epoch=epoch, kind=record.kind, body=record.model_dump_json(), at=at)


def _unix_time(connection: Connection) -> ColumnClause[int]:
    """Returns the Unix time in seconds by the database's clock, which all its clients share, as an expression."""
    return literal_column(_NOW[connection.dialect.name], BigInteger)
