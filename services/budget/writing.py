"""Writing one row. Whoever does holds the ledger's lock and has verified everything before it."""

from dataclasses import asdict
from datetime import UTC, datetime

from sqlalchemy import Connection, insert

from services.budget.chain import Row, link
from services.budget.entries import Entry
from services.budget.table import ledger_table


def append(connection: Connection, head: Row | None, epoch: int, entry: Entry) -> Row:
    """The row that follows `head`, or the first one, written."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    row = link(head, epoch=epoch, kind=entry.kind, body=entry.model_dump_json(), at=at)
    connection.execute(insert(ledger_table).values(asdict(row)))
    return row
