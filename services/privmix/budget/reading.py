"""Reads ledgers: for the writer when it starts, and for other programs at any time."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from sqlalchemy import Connection

from privmix.budget.anchor import Anchor, anchored, lost_ends, rolled_back
from privmix.budget.chain import LedgerRow
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.signing import SigningKey
from privmix.budget.state import Balance, LedgerState
from privmix.budget.store import schema
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.rows import every_row, last_checkpoint, rows
from privmix.foundation.errors import LedgerCorrupt, LedgerMismatch


def replay_whole(connection: Connection) -> LedgerState:
    """Replays every row of the ledger and verifies the whole chain."""
    return LedgerState.replay(every_row(connection))


def replay(connection: Connection) -> LedgerState:
    """Replays the ledger from its last checkpoint and verifies the chain from there on."""
    schema.check(connection)
    checkpoint = last_checkpoint(connection)
    if checkpoint is None:
        return replay_whole(connection)
    recent = rows(connection, since=checkpoint - 1)
    return LedgerState.replay(recent, before=next(recent))


def check(
    ledger: str | Path, terms: PrivacyBudget, identity: str | None = None, anchors: tuple[Anchor, ...] = ()
) -> None:
    """Checks that a ledger keeps this budget and has all rows that its anchors know. Does not disturb its writer.

    Args:
        identity: the expected id of the ledger; None accepts any.

    Raises:
        LedgerMismatch: the ledger keeps another budget or has another id.
        LedgerRolledBack: the ledger lacks rows.
        LedgerUnknown: an anchor does not know the ledger.
        LedgerError: the ledger cannot be read.
    """
    with LedgerDatabase(ledger, "read").transaction() as connection:
        known = replay(connection).id
        ends = anchored(anchors, identity or known, create=False)
    # After the anchors were read: the writer stores rows before their end is anchored.
    with LedgerDatabase(ledger, "read").transaction() as connection:
        state = replay(connection)
        check_same_ledger(state, terms, identity or known)
        if lost := lost_ends(connection, state.balance(), ends):
            raise rolled_back(state.balance(), lost)


def check_same_ledger(state: LedgerState, terms: PrivacyBudget, identity: str | None) -> None:
    """Raises LedgerMismatch if the ledger has another id than expected or keeps another budget."""
    if identity not in (None, state.id):
        raise LedgerMismatch(
            f"this is the ledger {state.id}, but this ensemble's is {identity}: set budget.ledger to the place of that "
            "one, because this ledger does not know the tokens charged there"
        )
    state.terms.check_same(terms)


def read(ledger: str | Path) -> Balance:
    """Returns the balance of the ledger at a path or URL, verified from its last checkpoint on.

    Writes nothing, and a writer may be active.

    Raises:
        LedgerError: the ledger cannot be read; the subclass and the message say why.
    """
    with LedgerDatabase(ledger, "read").transaction() as connection:
        return replay(connection).balance()


def verify(ledger: str | Path, key: SigningKey | None = None, head: str = "") -> Balance:
    """Verifies a whole ledger and returns its balance. Otherwise as `read`.

    Args:
        key: the key that must have signed the whole chain.
        head: the beginning of the hash of a row that was once the last, and must still be in the chain.

    Raises:
        LedgerCorrupt: a row was changed, which the message names, or no row has the hash `head`.
        LedgerUnsigned: `key` did not sign the whole chain.
        LedgerError: the ledger cannot be read; the subclass and the message say why.
    """
    found = not head

    def looked_through(rows: Iterable[LedgerRow]) -> Iterator[LedgerRow]:
        nonlocal found
        for row in rows:
            found = found or row.hash.startswith(head)
            yield row

    with LedgerDatabase(ledger, "read").transaction() as connection:
        balance = LedgerState.replay(looked_through(every_row(connection))).balance()
        if not found:
            raise LedgerCorrupt(f"no row has the hash {head}: rows were removed from its end, or it was rewritten")
        if key is not None:
            key.check(balance)
        return balance
