"""Why the ledger was not used. Whoever meets one of these was granted nothing."""

from typing import Self


class LedgerError(Exception):
    """The ledger cannot be used; the message names the ledger and the fix."""

    ledger: str | None = None

    def of(self, ledger: str) -> Self:
        """The same error, naming its ledger; the one that is named first stays."""
        self.ledger = self.ledger or ledger
        return self

    def __str__(self) -> str:
        message = super().__str__()
        return f"ledger {self.ledger}: {message}" if self.ledger else message


class LedgerMissing(LedgerError):  # noqa: N818 (the names say the state)
    """There is no ledger at this place."""


class LedgerUnknown(LedgerError):  # noqa: N818
    """Nothing says which ledger is this ensemble's."""


class LedgerForeign(LedgerError):  # noqa: N818
    """What is at this place is no privmix ledger, or one of an unknown format."""


class LedgerMismatch(LedgerError):  # noqa: N818
    """The ledger holds another promise than the configuration makes."""


class LedgerCorrupt(LedgerError):  # noqa: N818
    """The ledger was changed after it was written; the message names the row."""


class LedgerUnavailable(LedgerError):  # noqa: N818
    """The ledger could not be read or written now: a full or read-only disk, a lock, a lost connection."""


class LedgerExists(LedgerError):  # noqa: N818
    """There is a ledger where none may be."""


class LedgerMoved(LedgerError):  # noqa: N818
    """The ledger goes on somewhere else, and is never written here again; the message names the place."""


class Fenced(LedgerError):  # noqa: N818
    """Another writer has opened the ledger since; this one may not write again."""


class LeaseRefused(ValueError):  # noqa: N818
    """The ledger is fine and the request is not: a bad count, an unknown lease, more used than granted."""
