"""The receipt: an ensemble's directory names the ledger that keeps its budget, so that it never gets a second one.

A ledger that is begun again forgets what was spent. So it is begun once, on purpose (`begin`), and served only where
the ledger at the configured place is the one that the receipt, or the configuration, names (`known`).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from services.budget.errors import LedgerForeign, LedgerMismatch, LedgerMissing, LedgerUnavailable, LedgerUnknown
from services.budget.ledger import Ledger
from services.budget.privacy_budget import PrivacyBudget
from services.budget.reader import check, read
from services.budget.store.database import Database
from services.files import sync_directory

FILE = "ledger.receipt"


class Receipt(BaseModel):
    """What the directory of an ensemble records.

    `ledger` is the ledger's id, None in receipts that were written before ledgers had one. `begun` is False from just
    before the ledger is made until it is there; nothing is served meanwhile.
    """

    model_config = ConfigDict(frozen=True)

    ledger: str | None
    begun: bool = True

    @classmethod
    def load(cls, ensemble: Path) -> "Receipt | None":
        """Return the receipt in an ensemble's directory, if there is one.

        Raises:
            LedgerForeign: it cannot be read.
        """
        try:
            text = (ensemble / FILE).read_text(encoding="utf-8")
            return cls.model_validate_json(text) if text.strip() else cls(ledger=None)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise LedgerForeign(f"the receipt {ensemble / FILE} cannot be read: restore it from a backup") from error

    def save(self, ensemble: Path, *, new: bool = False) -> None:
        """Write the receipt, durably and whole.

        Args:
            new: there must be none yet.

        Raises:
            LedgerUnavailable: the directory cannot be written, or `new` and there is a receipt.
        """
        partial = ensemble / f"{FILE}.{uuid4().hex}"
        try:
            with partial.open("x", encoding="utf-8") as file:
                file.write(self.model_dump_json(indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            if new:
                os.link(partial, ensemble / FILE)
            else:
                partial.replace(ensemble / FILE)
            sync_directory(ensemble)
        except FileExistsError as error:
            raise LedgerUnavailable("another process begins it now; wait for that and run the command again") from error
        except OSError as error:
            raise LedgerUnavailable(
                f"the directory {ensemble} cannot be written ({error.strerror}), so it cannot record its ledger: let "
                "`privmix ledger init` write to it once, or set budget.ledger_id"
            ) from error
        finally:
            partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class Begun:
    """The id of an ensemble's ledger, its place without a password, and whether it was made just now."""

    ledger: str
    place: str
    new: bool


def begin(ledger: str, terms: PrivacyBudget, ensemble: Path) -> Begun:
    """Make the ledger of an ensemble that has none, and record it. Interrupted, it goes on; repeated, it only checks.

    A ledger that is there already, for this ensemble, is recorded where the ensemble has no receipt.

    Raises:
        LedgerMissing: the ensemble has a ledger, which is not at this place.
        LedgerError: the ledger or the receipt cannot be made, or is another one.
    """
    receipt, place = Receipt.load(ensemble), Database(ledger, "read").name
    if receipt is not None and receipt.begun:
        return Begun(known(ledger, terms, ensemble), place, new=False)
    if receipt is None and not is_missing(ledger):
        check(ledger, terms)
        found = Receipt(ledger=read(ledger).id)
        found.save(ensemble, new=True)
        return Begun(found.ledger or "", place, new=False)
    if receipt is None:
        receipt = Receipt(ledger=uuid4().hex, begun=False)
        receipt.save(ensemble, new=True)  # first: a directory that cannot record its ledger gets none
    identity = receipt.ledger or ""
    Ledger(ledger, terms, create=True, identity=identity)
    Receipt(ledger=identity).save(ensemble)
    return Begun(identity, place, new=True)


def known(ledger: str, terms: PrivacyBudget, ensemble: Path, identity: str | None = None) -> str:
    """Check that the ledger at this place is the ensemble's, and keeps this budget; returns its id.

    Args:
        identity: the ledger's id by the configuration, for an ensemble in a directory that nobody can write.

    Raises:
        LedgerUnknown: neither the ensemble nor the configuration names a ledger.
        LedgerMissing: there is no ledger at this place.
        LedgerMismatch: it is another one, or keeps another budget.
        LedgerError: it cannot be read.
    """
    receipt, place = Receipt.load(ensemble), Database(ledger, "read").name
    if receipt is None and identity is None:
        raise LedgerUnknown(
            f"{ensemble} has no receipt ({FILE}) of its ledger: run `privmix ledger init`, once, to begin the ledger "
            "or to record the one that is there"
        ).of(place)
    recorded = None if receipt is None else receipt.ledger
    if identity is not None and recorded not in (None, identity):
        raise LedgerMismatch(f"budget.ledger_id is {identity}, and {ensemble / FILE} names {recorded}").of(place)
    if receipt is not None and not receipt.begun:
        raise LedgerUnknown("its beginning was interrupted: run `privmix ledger init` again").of(place)
    try:
        check(ledger, terms, identity or recorded)
    except LedgerMissing as error:
        raise LedgerMissing(
            f"this ensemble's ledger is not there; put it back, or correct budget.ledger. Only if nothing private was "
            f"ever released from this ensemble, remove {ensemble / FILE} to begin another"
        ).of(place) from error
    found = identity or recorded or read(ledger).id
    if receipt is not None and recorded is None:
        Receipt(ledger=found).save(ensemble)
    return found


def is_fresh(ledger: str, ensemble: Path) -> bool:
    """Whether the ensemble never had a ledger, as far as its directory and the configured place tell."""
    receipt = Receipt.load(ensemble)
    return is_missing(ledger) if receipt is None else not receipt.begun


def is_missing(ledger: str) -> bool:
    """Whether there is no ledger at this place; raises LedgerError where that cannot be told."""
    try:
        read(ledger)
    except LedgerMissing:
        return True
    return False
