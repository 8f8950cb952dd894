"""Verifies a whole ledger."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from privmix.budget.chain import LedgerRow
from privmix.budget.signing import SigningKey
from privmix.budget.state import Balance, LedgerState
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.rows import every_row
from privmix.foundation.errors import LedgerCorrupt, LedgerError


def verify(place: str | Path, *, head: str | None = None, key: SigningKey | None = None) -> Balance:
    """Verifies a whole ledger and returns its balance.

    Args:
        head: the hash, or a prefix of the hash, of a row that was once the last. The row must still exist.
        key: the key that must have signed the whole chain.

    Raises:
        LedgerCorrupt: a row was changed, or rows were removed from the end. The message names the row.
        LedgerUnsigned: `key` did not sign the whole chain.
        LedgerError: the ledger cannot be read. The subclass and the message say why.
    """
    database = LedgerDatabase(place, "read")
    found = head is None

    def watched(rows: Iterable[LedgerRow]) -> Iterator[LedgerRow]:
        nonlocal found
        for row in rows:
            found = found or row.hash.startswith(head or "")
            yield row

    try:
        with database.transaction() as connection:
            balance = LedgerState.replay(watched(every_row(connection))).balance()
        if not found:
            raise LedgerCorrupt(f"no row has the hash {head}: rows were removed from its end, or it was rewritten")
        if key is not None:
            key.check(balance)
    except LedgerError as error:
        raise error.of(database.name) from error
    return balance
