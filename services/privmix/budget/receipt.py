"""Records in an ensemble's directory which ledger keeps its budget, so that it never gets a second ledger.

A second ledger would forget what was spent. So a ledger is created only once and explicitly (`begin`), and an ensemble
is served only with the ledger that its receipt names (`verified_ledger_id`). An anchor elsewhere
remembers it, too, in case the receipt is lost (`Claim`).
"""

from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from privmix.budget.anchor import Anchor, ChainEnd, anchor_at, explained, is_same, is_writable, present
from privmix.budget.claim import Claim
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import check, read
from privmix.budget.signing import SigningKey
from privmix.budget.store.database import LedgerDatabase
from privmix.foundation.errors import (
    LedgerForeign,
    LedgerMissing,
    LedgerUnavailable,
    LedgerUnknown,
)
from privmix.foundation.files import create_atomically, locked, write_atomically

FILE = "ledger.receipt"


class Receipt(BaseModel):
    """Names the ledger of an ensemble, in a file in the ensemble's directory.

    Attributes:
        ledger: the ledger's id.
        begun: False while the ledger is being created. The ensemble is not served until it is True.
        end: the end of the ledger's chain, as of the last write of `ReceiptAnchor`.
    """

    model_config = ConfigDict(frozen=True)

    ledger: str
    begun: bool = True
    end: ChainEnd | None = None

    @classmethod
    def load(cls, ensemble: Path) -> "Receipt | None":
        """Returns the receipt in an ensemble's directory; None if there is none.

        Raises:
            LedgerForeign: the receipt cannot be read.
        """
        try:
            text = (ensemble / FILE).read_text(encoding="utf-8")
            return cls.model_validate_json(text)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise LedgerForeign(f"the receipt {ensemble / FILE} cannot be read: restore it from a backup") from error

    def content(self) -> bytes:
        """Returns the content of the file."""
        return self.model_dump_json(indent=2).encode() + b"\n"

    def save(self, ensemble: Path, *, new: bool = False) -> None:
        """Writes the receipt durably and atomically.

        Args:
            new: fail if there is a receipt already.

        Raises:
            LedgerUnavailable: the directory cannot be written, or there is a receipt and `new` is True.
        """
        try:
            (create_atomically if new else write_atomically)(ensemble / FILE, self.content())
        except FileExistsError as error:
            raise LedgerUnavailable("another process is creating it; wait and run the command again") from error
        except OSError as error:
            raise LedgerUnavailable(
                f"the directory {ensemble} cannot be written ({error.strerror}), so it cannot record its ledger: let "
                "`privmix ledger init` write to it once"
            ) from error


@dataclass(frozen=True)
class ReceiptAnchor(Anchor):
    """Stores the end of the chain in the receipt in an ensemble's directory.

    A `fixed` receipt is in a directory that could not be written when the service started, beside another anchor that
    stores each end. The ledger must contain its end, which stays.
    """

    ensemble: Path
    fixed: bool = False

    @property
    def name(self) -> str:
        return str(self.ensemble / FILE)

    def read(self, ledger: str) -> ChainEnd | None:
        receipt = Receipt.load(self.ensemble)
        return None if receipt is None else receipt.end

    def swap(self, end: ChainEnd, before: ChainEnd | None) -> ChainEnd:
        if self.fixed:
            return end
        with explained(self.name, "written"), locked(self.ensemble / FILE):
            receipt = Receipt.load(self.ensemble)
            stored = None if receipt is None else receipt.end
            if receipt is None or not is_same(stored, before):
                return present(stored, self.name)
            write_atomically(self.ensemble / FILE, receipt.model_copy(update={"end": end}).content())
        return end


def anchors_of(ensemble: Path, place: str | None = None) -> tuple[Anchor, ...]:
    """Returns the anchors of an ensemble's ledger: its receipt, and the one at `place` (`anchor_at`).

    A receipt whose directory cannot be written stores no end. It is an anchor beside the one at `place`, which then
    stores them; without that one it makes every grant fail, because a copy of the ledger would be accepted later.

    Raises:
        LedgerForeign: the receipt cannot be read, or `place` cannot be an anchor.
    """
    receipt, writable = Receipt.load(ensemble), is_writable(ensemble)
    others = [anchor_at(place)] if place else []
    if receipt is None or (receipt.end is None and not writable):
        return tuple(others)
    return (ReceiptAnchor(ensemble, fixed=bool(others) and not writable), *others)


def claim_at(place: str | None, terms: PrivacyBudget, ledger: str) -> Claim:
    """Returns the claim of an ensemble for the ledger at this place, in the anchor at `place`."""
    return Claim(place, terms.ensemble, LedgerDatabase(ledger, "read").name)


@dataclass(frozen=True)
class LedgerCreation:
    """Reports the id of an ensemble's ledger, its place without a password, and whether it is new."""

    ledger: str
    place: str
    new: bool


def begin(
    ledger: str,
    terms: PrivacyBudget,
    ensemble: Path,
    anchor: str | None = None,
    key: SigningKey | None = None,
) -> LedgerCreation:
    """Creates the ledger of an ensemble and records it in a receipt and its anchors.

    A repeated call completes an interrupted one, or only checks the ledger. If the ensemble has no receipt and the
    place has a ledger of this ensemble, the receipt names that ledger. An anchor that is new gets the chain's end. A
    chain that the key did not sign yet is verified and signed.

    Args:
        anchor: the second anchor's place (`anchors_of`).
        key: signs the chain.

    Raises:
        LedgerMissing: the ensemble has a ledger, but not at this place.
        LedgerUnknown: the anchor knows another ledger of the ensemble.
        LedgerError: the ledger or the receipt cannot be written, or the place has another ledger.
    """
    receipt, claim = Receipt.load(ensemble), claim_at(anchor, terms, ledger)
    if receipt is not None and receipt.begun:
        id_ = verified_ledger_id(ledger, terms, ensemble, anchored=False)
        _anchor_existing(ledger, terms, ensemble, id_, claim, key)
        return LedgerCreation(id_, claim.ledger_place, new=False)
    if receipt is None and not is_missing(ledger):
        check(ledger, terms)
        id_ = read(ledger).id
        claim.check(id_)
        Receipt(ledger=id_).save(ensemble, new=True)
        _anchor_existing(ledger, terms, ensemble, id_, claim, key)
        return LedgerCreation(id_, claim.ledger_place, new=False)
    if receipt is None:
        claim.check(None)  # before a receipt that would refuse the ledger that is put back
        receipt = Receipt(ledger=uuid4().hex, begun=False)
        receipt.save(ensemble, new=True)  # before the ledger: a directory that cannot record a ledger gets none
    # After the receipt, whose id a repeated call claims again, and before the ledger: nothing is spent unclaimed.
    claim.store(receipt.ledger)
    Ledger.create(ledger, terms, identity=receipt.ledger, anchors=anchors_of(ensemble, anchor), key=key)
    with locked(ensemble / FILE):
        (Receipt.load(ensemble) or receipt).model_copy(update={"begun": True}).save(ensemble)
    return LedgerCreation(receipt.ledger, claim.ledger_place, new=True)


def _anchor_existing(
    ledger: str, terms: PrivacyBudget, ensemble: Path, identity: str, claim: Claim, key: SigningKey | None
) -> None:
    """Stores the end of an existing ledger's chain in the anchors that have none, and checks it against the others."""
    claim.store(identity)  # first: an anchor that knows its end would accept it, and nothing is spent unclaimed
    anchors = anchors_of(ensemble, claim.place)
    Ledger.create(ledger, terms, identity=identity, anchors=anchors, holder=uuid4().hex, key=key)  # takes nothing over


def verified_ledger_id(
    ledger: str,
    terms: PrivacyBudget,
    ensemble: Path,
    anchor: str | None = None,
    *,
    anchored: bool = True,
) -> str:
    """Checks that the ledger at this place belongs to the ensemble and keeps this budget; returns its id.

    Args:
        anchor: the second anchor's place (`anchors_of`).
        anchored: check that the ledger has all rows that its anchors know.

    Raises:
        LedgerUnknown: the ensemble names no ledger, or the anchor knows another one.
        LedgerMissing: there is no ledger at this place.
        LedgerMismatch: the ledger has another id or keeps another budget.
        LedgerRolledBack: the ledger lacks rows that an anchor knows.
        LedgerError: the ledger cannot be read.
    """
    receipt, place = Receipt.load(ensemble), LedgerDatabase(ledger, "read").name
    if receipt is None:
        raise LedgerUnknown(
            f"{ensemble} has no receipt ({FILE}) of its ledger: run `privmix ledger init` once, to create the ledger "
            "or to record the existing one"
        ).of(place)
    if not receipt.begun:
        raise LedgerUnknown("its creation was interrupted: run `privmix ledger init` again").of(place)
    try:
        check(ledger, terms, receipt.ledger, anchors_of(ensemble, anchor) if anchored else ())
    except LedgerMissing as error:
        raise LedgerMissing(
            f"this ensemble's ledger is not there; put it back, or correct budget.ledger. Only if nothing private was "
            f"ever released from this ensemble, remove {ensemble / FILE} to create a new ledger"
        ).of(place) from error
    if anchored:
        claim_at(anchor, terms, ledger).check(receipt.ledger)
    return receipt.ledger


def is_fresh(ledger: str, ensemble: Path) -> bool:
    """Returns whether neither the ensemble's directory nor the configured place shows that it has had a ledger."""
    receipt = Receipt.load(ensemble)
    return is_missing(ledger) if receipt is None else not receipt.begun


def is_missing(ledger: str) -> bool:
    """Returns whether there is no ledger at this place. Raises LedgerError if this cannot be determined."""
    try:
        read(ledger)
    except LedgerMissing:
        return True
    return False
