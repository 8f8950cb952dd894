"""Verifies a whole ledger."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from privmix.budget.chain import LedgerRow
from privmix.budget.signing import SigningKey
from privmix.budget.state import Balance, LedgerState
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.rows import every_row
from privmix.foundation.errors import LedgerCorrupt, LedgerError


def verify(
    place: str | Path, *, head: str | None = None, length: int | None = None, key: SigningKey | None = None
) -> Balance:
    """Verifies a whole ledger and returns its balance.

    Args:
        head: the hash, or a prefix of the hash, of a row that was once the last. The row must still exist.
        length: a former number of rows. The ledger must have at least as many; with `head`, it is that row's number.
        key: the key that must have signed the whole chain.

    Raises:
        LedgerCorrupt: a row was changed, or rows were removed from the end. The message names the row.
        LedgerUnsigned: `key` did not sign the whole chain.
        LedgerError: the ledger cannot be read. The subclass and the message say why.
    """
    database = LedgerDatabase(place, "read")
    matches: list[int] = []

    def watched(rows: Iterable[LedgerRow]) -> Iterator[LedgerRow]:
        for row in rows:
            if head is not None and row.hash.startswith(head):
                matches.append(row.seq)
            yield row

    try:
        with database.transaction() as connection:
            balance = LedgerState.replay(watched(every_row(connection))).balance()
        _check_end(balance, head, length, matches)
        if key is not None:
            key.check(balance)
    except LedgerError as error:
        raise error.of(database.name) from error
    return balance


def _check_end(balance: Balance, head: str | None, length: int | None, matches: list[int]) -> None:
    if length is not None and balance.rows < length:
        raise LedgerCorrupt(f"it had {length} rows and has {balance.rows} now: rows were removed from its end")
    if head is not None and not (matches if length is None else length in matches):
        problem = f"no row has the hash {head}" if length is None else f"row {length} does not have the hash {head}"
        raise LedgerCorrupt(f"{problem}: rows were removed from its end, or it was rewritten")
