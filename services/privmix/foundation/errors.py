"""Defines the errors whose messages tell a person what is wrong and how to fix it: one tree, which imports nothing.

The command line prints them in one line, and exits with 2 for an `InputError` and with 1 for a `WorkError`.
"""

# Names such as `LedgerMissing` say the state, as the names of HTTP's reasons do.
# ruff: noqa: N818

from collections.abc import Mapping
from typing import Self


class InputError(Exception):
    """The input is invalid. The message names the field and the fix."""


class ConfigurationError(InputError):
    """The configuration is invalid. The message names the key and the fix."""


class CorpusError(InputError):
    """The corpus or a line of it is invalid."""


class ManifestError(InputError):
    """The ensemble has no valid manifest, or differs from it. The message names the difference."""


class PublicModelError(InputError):
    """The named public model cannot be used. The message says why and how to fix it."""


class ReaderError(InputError, ValueError):
    """The model or the adapter does not support reader attention. The message names the cause."""


class DataError(InputError):
    """A table is invalid. The message names the file and the field."""


class WorkError(Exception):
    """The work failed or is refused. The message names the failed part.

    A training, an evaluation or a generation keeps its finished results, and the same command continues from them.
    """


EXTRAS: Mapping[str, str] = {
    "vllm": "cpu",
    "matplotlib": "lab",
    "sklearn": "heads",
    "pandas": "heads",
    "statsmodels": "heads",
    "tables": "heads",
    "psycopg": "postgresql",
    "faker": "demo",
    "gguf": "demo",
}
"""The extra of privmix that installs each module that some work needs. The service trains and serves without them."""


class ExtraMissing(WorkError):
    """The work needs a package that an extra of privmix installs. The message names the extra."""

    @classmethod
    def of(cls, error: ModuleNotFoundError) -> Self | None:
        """Returns the error about the extra; None if no extra has the module."""
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            return None
        command = f"pip install 'privmix[{EXTRAS[module]}]'"
        other = ", or with an NVIDIA GPU 'privmix[gpu]'" if module == "vllm" else ""
        return cls(f"needs the package {module}, which is not installed: {command}{other}")


class DatabaseError(WorkError):
    """The database cannot be used."""


class DatabaseMissing(DatabaseError):
    """There is no database at this place."""


class DatabaseForeign(DatabaseError):
    """The file is no database, or belongs to another application."""


class DatabaseCorrupt(DatabaseError):
    """The database is damaged."""


class DatabaseUnavailable(DatabaseError):
    """The database could not be read or written now: a full or read-only disk, a lock, a lost connection."""


class DatabaseConflict(DatabaseUnavailable):
    """A row violates a constraint."""


class LedgerError(WorkError):
    """The ledger cannot be used; the message names the ledger and the fix. The call has granted nothing."""

    ledger: str | None = None

    def of(self, ledger: str) -> Self:
        """Adds the ledger's name, unless the error has one already, and returns the error."""
        self.ledger = self.ledger or ledger
        return self

    def __str__(self) -> str:
        message = super().__str__()
        return f"ledger {self.ledger}: {message}" if self.ledger else message


class LedgerMissing(LedgerError):
    """There is no ledger at this place."""


class LedgerUnknown(LedgerError):
    """Neither the ensemble nor the configuration names the ensemble's ledger, or an anchor names another one."""


class LedgerForeign(LedgerError):
    """The file or database is not a privmix ledger, or has an unknown format."""


class LedgerMismatch(LedgerError):
    """The ledger keeps another privacy budget than the configured one."""


class LedgerCorrupt(LedgerError):
    """The ledger was changed after it was written; the message names the row."""


class LedgerRolledBack(LedgerCorrupt):
    """The ledger lacks rows that it had: a copy was restored, or its server lost commits."""


class LedgerUnsigned(LedgerCorrupt):
    """The ledger's last rows were not signed with the configured key: it was rewritten, or written without the key."""


class LedgerUnavailable(LedgerError):
    """The ledger could not be read or written now: a full or read-only disk, a lock, a lost connection."""


class Fenced(LedgerError):
    """Another writer has taken over the ledger. This one must not write again."""


class LeaseRefused(ValueError):
    """The request is invalid: a bad count, an unknown lease, or more tokens used than granted. It is a caller's error,
    not a person's."""


class KeysError(WorkError):
    """An operation on keys is refused. The message names the reason and the fix."""


class KeysUnavailable(KeysError):
    """The database of the keys cannot be used. The message says why."""


class FleetError(WorkError):
    """A change of the fleet failed and has had no effect. The message says why."""


class CoordinatorError(WorkError):
    """Refuses a submission. No generation of it has started, and nothing was charged."""


class Overloaded(CoordinatorError):
    """The queue is full. `retry_after` is in seconds."""

    def __init__(self, retry_after: float = 1.0) -> None:
        super().__init__(retry_after)
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"too many generations are waiting; try again in {self.retry_after:g} s"


class CoordinatorUnavailable(CoordinatorError):
    """A component that the generation needs does not answer. The message names it."""


class CoordinatorStopping(CoordinatorError):
    """The coordinator stops with its service or its ensemble, and starts nothing more."""

    def __str__(self) -> str:
        return "the service is stopping"


class GenerationError(WorkError):
    """The job of synthetic text stopped. It keeps the delivered text, and running it again continues it."""


class BudgetEndedError(GenerationError):
    """The privacy budget, or the key's share of it, is used up."""


class StreamBrokenError(GenerationError):
    """A stream broke off after a part of the text was delivered. The rest can be requested."""


def loggable(error: Exception) -> str:
    """Returns what a log may say of an error: of a foreign one its type, because its text may be private."""
    cause = getattr(error, "cause", None) or error  # Ray wraps what an actor raised
    ours = isinstance(cause, CoordinatorUnavailable | KeysUnavailable | LedgerError)
    return str(cause) if ours else type(cause).__name__
