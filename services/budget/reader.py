"""Reading a ledger: for its writer when it starts, and for anyone else at any time."""

from pathlib import Path

from sqlalchemy import Connection

from services.budget.errors import LedgerMismatch
from services.budget.privacy_budget import PrivacyBudget
from services.budget.state import Balance, LedgerState
from services.budget.store import schema
from services.budget.store.database import Database
from services.budget.store.rows import every_row, last_checkpoint, rows


def replay_whole(connection: Connection) -> LedgerState:
    """Replay every row of the ledger, its whole chain verified."""
    return LedgerState.replay(every_row(connection))


def replay(connection: Connection) -> LedgerState:
    """Replay the ledger from its last checkpoint, the chain verified from the row before that on."""
    schema.check(connection)
    checkpoint = last_checkpoint(connection)
    if checkpoint is None:
        return replay_whole(connection)
    recent = rows(connection, since=checkpoint - 1)
    return LedgerState.replay(recent, before=next(recent))


def check(ledger: str | Path, terms: PrivacyBudget, identity: str | None = None) -> None:
    """Check that a ledger keeps this budget, before anything is started, and without taking it from its writer.

    Args:
        identity: the id of the ledger that is expected there; None accepts any.

    Raises:
        LedgerMismatch: it keeps another budget, or it is another ledger.
        LedgerError: it cannot be read.
    """
    with Database(ledger, "read").transaction() as connection:
        demand(replay(connection), terms, identity)


def demand(state: LedgerState, terms: PrivacyBudget, identity: str | None) -> None:
    """Raises LedgerMismatch where a ledger is another one than expected, or keeps another budget."""
    if identity not in (None, state.id):
        raise LedgerMismatch(
            f"this is the ledger {state.id}, and this ensemble's is {identity}: name the place of that one in "
            "budget.ledger, because tokens that were charged there would be forgotten here"
        )
    state.terms.demand(terms)


def read(ledger: str | Path) -> Balance:
    """Where the ledger at this path or URL stands, verified from its last checkpoint on.

    Writes nothing; a writer may be at work. `services.budget.export.verify` verifies the whole chain.

    Raises:
        LedgerError: the ledger cannot be read; the subclass and the message say why.
    """
    with Database(ledger, "read").transaction() as connection:
        return replay(connection).balance()
