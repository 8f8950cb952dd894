"""Moves a ledger to another database, where its chain continues; the old ledger can never be written again.

Both databases are locked while the rows are copied and verified. Then a last row that names the new place fences the
old ledger and is committed; only after that, the copy is committed. A crash at any moment leaves at most one writable
ledger, and a repeated move completes the first.
"""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from sqlalchemy import Connection, insert, select

from privmix.budget.chain import LedgerRow, verified
from privmix.budget.reader import read, replay_whole
from privmix.budget.records import Moved
from privmix.budget.state import Balance, LedgerState
from privmix.budget.store import schema
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.rows import append, following, rows
from privmix.budget.store.schema import ledger_table
from privmix.foundation.errors import LedgerCorrupt, LedgerExists, LedgerMoved

_BATCH = 1_000


def move(source: str | Path, target: str | Path) -> Balance:
    """Moves the ledger into a database that has none and returns its balance there.

    Fences out the writer of the old ledger. A repeated move to the same place has no effect.

    Raises:
        LedgerExists: the target has another ledger.
        LedgerMoved: the source was moved to another place before.
        LedgerError: the source or the target cannot be used. The subclass and the message say which and why.
    """
    here, there = LedgerDatabase(source, "copy"), LedgerDatabase(target, "create")
    with LedgerDatabase(source, "read").transaction() as connection:  # check before creating anything at the target
        left = replay_whole(connection)
        _check_may_go(left, there.name)
    with there.transaction() as arriving:
        if schema.migrate(arriving, create=True):
            with here.transaction() as leaving:
                _move(leaving, arriving, there.name)
        else:
            _check_arrived(left, arriving)
    return read(target)


def _move(leaving: Connection, arriving: Connection, to: str) -> None:
    original = replay_whole(leaving)
    _check_may_go(original, to)
    length, head = _end(original)
    _copy(islice(verified(rows(leaving)), length), arriving)
    copied = replay_whole(arriving).head
    if (copied.seq, copied.hash) != (length, head):
        raise LedgerCorrupt(f"the copy ends at row {copied.seq} with hash {copied.hash}, the original at row {length}")
    if original.moved is None:
        append(leaving, [following(original.head, original.epoch, Moved(to=to))])


def _copy(chain: Iterable[LedgerRow], arriving: Connection) -> None:
    remaining = iter(chain)
    while batch := list(islice(remaining, _BATCH)):
        arriving.execute(insert(ledger_table), [row.fields() for row in batch])


def _check_may_go(original: LedgerState, to: str) -> None:
    if original.moved not in (None, to):
        raise LedgerMoved(f"it was moved to {original.moved} before: finish that move, or move it from there")


def _check_arrived(left: LedgerState, arriving: Connection) -> None:
    schema.check(arriving)
    length, head = _end(left)
    arrived = arriving.execute(select(ledger_table.c.hash).where(ledger_table.c.seq == length)).scalar()
    if left.moved is None or arrived != head:
        raise LedgerExists("there is a ledger already; choose a database without a ledger")


def _end(original: LedgerState) -> tuple[int, str]:
    """Returns the number and the hash of the last row to copy: all rows but the one that records the move."""
    last = original.head
    return (last.seq, last.hash) if original.moved is None else (last.seq - 1, last.previous)
