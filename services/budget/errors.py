"""Defines the errors of the ledger. A call that raises one of them has granted nothing."""

from typing import Self

from services.errors import WorkError


class LedgerError(WorkError):
    """The ledger cannot be used; the message names the ledger and the fix."""

    ledger: str | None = None

    def of(self, ledger: str) -> Self:
        """Adds the ledger's name, unless the error has one already, and returns the error."""
        self.ledger = self.ledger or ledger
        return self

    def __str__(self) -> str:
        message = super().__str__()
        return f"ledger {self.ledger}: {message}" if self.ledger else message


class LedgerMissing(LedgerError):  # noqa: N818 (the names say the state)
    """There is no ledger at this place."""


class LedgerUnknown(LedgerError):  # noqa: N818
    """Neither the ensemble nor the configuration names the ensemble's ledger."""


class LedgerForeign(LedgerError):  # noqa: N818
    """The file or database is not a privmix ledger, or has an unknown format."""


class LedgerMismatch(LedgerError):  # noqa: N818
    """The ledger keeps another privacy budget than the configured one."""


class LedgerCorrupt(LedgerError):  # noqa: N818
    """The ledger was changed after it was written; the message names the row."""


class LedgerRolledBack(LedgerCorrupt):
    """The ledger lacks rows that it had: a copy was restored, or its server lost commits."""


class LedgerUnavailable(LedgerError):  # noqa: N818
    """The ledger could not be read or written now: a full or read-only disk, a lock, a lost connection."""


class LedgerExists(LedgerError):  # noqa: N818
    """The target already has a ledger."""


class LedgerMoved(LedgerError):  # noqa: N818
    """The ledger was moved and must not be written here again. The message names its new place."""


class Fenced(LedgerError):  # noqa: N818
    """Another writer has taken over the ledger. This one must not write again."""


class LeaseRefused(ValueError):  # noqa: N818
    """The request is invalid: a bad count, an unknown lease, or more tokens used than granted."""
