"""Opens the database of a ledger: one append-only table."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection

from privmix.budget.store.schema import ledger_table
from privmix.database.backend import Access, DatabaseUsage
from privmix.database.database import Database
from privmix.foundation.errors import (
    DatabaseCorrupt,
    DatabaseError,
    DatabaseForeign,
    DatabaseMissing,
    DatabaseUnavailable,
    LedgerCorrupt,
    LedgerError,
    LedgerForeign,
    LedgerMissing,
    LedgerUnavailable,
)

# The lock is "privmix" in ASCII. A SQLite file is opened anew for each transaction.
_LEDGER = DatabaseUsage("a ledger", lock=0x707269766D6978, table=ledger_table.name)

_ERRORS: dict[type[DatabaseError], type[LedgerError]] = {
    DatabaseMissing: LedgerMissing,
    DatabaseForeign: LedgerForeign,
    DatabaseCorrupt: LedgerCorrupt,
    DatabaseUnavailable: LedgerUnavailable,
}


class LedgerDatabase:
    """The database of a ledger at a path or a URL. The first transaction connects.

    Attributes:
        name: the absolute path, or the URL without its password.
    """

    def __init__(self, ledger: str | Path, access: Access) -> None:
        try:
            self._database = Database(ledger, access, _LEDGER)
        except DatabaseError as error:
            raise _translated(error) from error
        self.name = self._database.name

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """See `Database.transaction`.

        Raises:
            LedgerError: the database failed, or the block raised it. The error names the ledger.
        """
        try:
            with self._database.transaction() as connection:
                yield connection
        except DatabaseError as error:
            raise _translated(error).of(self.name) from error
        except LedgerError as error:
            error.of(self.name)
            raise


def _translated(error: DatabaseError) -> LedgerError:
    kind = next(kind for known, kind in _ERRORS.items() if isinstance(error, known))
    return kind(str(error))
