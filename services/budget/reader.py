"""Reading a ledger: for its writer when it starts, and for anyone else at any time."""

from pathlib import Path

from sqlalchemy import Connection

from services.budget.privacy_budget import PrivacyBudget
from services.budget.state import Balance, LedgerState
from services.budget.store.database import Database
from services.budget.store.rows import every_row


def replay(connection: Connection) -> LedgerState:
    """Everything in the ledger, its chain verified."""
    return LedgerState(every_row(connection))


def check(ledger: str | Path, terms: PrivacyBudget) -> None:
    """Whether a ledger keeps these terms: before anything is started, and without taking it from who writes it.

    Raises:
        LedgerMismatch: it keeps others.
        LedgerError: it cannot be read.
    """
    with Database(ledger, "read").transaction() as connection:
        replay(connection).terms.demand(terms)


def read(ledger: str | Path) -> Balance:
    """Where the ledger at this path or URL stands, its whole chain verified. Writes nothing; a writer may be at work.

    Raises:
        LedgerError: the ledger cannot be read; the subclass and the message say why.
    """
    with Database(ledger, "read").transaction() as connection:
        return replay(connection).balance()
