"""Claims an ensemble for one ledger in an anchor, so that where the anchor survives no second ledger is created.

An anchor stores the ends of chains under the ids of their ledgers, and a new ledger has a new id. So an ensemble whose
receipt and ledger were lost together, as on a volume that is restored to before the first start, would look new to its
anchor, too. A claim is stored under the ensemble's id, in the form of an end. It
is created once and never replaced.
"""

from dataclasses import dataclass

from privmix.budget.anchor import ChainEnd, anchor_at
from privmix.foundation.errors import LedgerError, LedgerUnknown

_FILL = "-"
"""Fills the id of a ledger up to the length of a hash, in whose place a claim has it."""


def key_of(ensemble: str) -> str:
    """Returns the key of an ensemble's claim, beside the ids of ledgers."""
    return f"ensemble-{ensemble}"


@dataclass(frozen=True)
class Claim:
    """Claims an ensemble in the anchor at `place`; does nothing without one.

    Attributes:
        place: the anchor's place (`anchor_at`); None if there is none.
        ensemble: the ensemble's id.
        ledger_place: the place of the ensemble's ledger, for messages.
    """

    place: str | None
    ensemble: str
    ledger_place: str

    def check(self, ledger: str | None) -> None:
        """Checks that the ensemble is not claimed for another ledger than that with this id; None is a new one.

        Raises:
            LedgerUnknown: it is.
            LedgerError: the anchor cannot be read.
        """
        self._stored(ledger)

    def store(self, ledger: str) -> None:
        """Claims the ensemble for the ledger with this id. A repeated call has no effect.

        Raises:
            LedgerUnknown: it is claimed for another ledger.
            LedgerError: the anchor cannot be read or written.
        """
        self._stored(ledger, ChainEnd(ledger=key_of(self.ensemble), rows=1, head=ledger.rjust(64, _FILL)))

    def _stored(self, ledger: str | None, mine: ChainEnd | None = None) -> None:
        """Stores a claim if there is none, and checks what is stored."""
        if self.place is None:
            return
        anchor = anchor_at(self.place)
        try:
            stored = anchor.read(key_of(self.ensemble))
            if stored is None and mine is not None:
                stored = anchor.swap(mine, None)
        except LedgerError as error:
            error.of(self.ledger_place)
            raise
        claimed = None if stored is None else stored.head.lstrip(_FILL)
        if claimed not in (None, ledger):
            raise LedgerUnknown(
                f"its anchor {anchor.name} knows that ensemble {self.ensemble} has the ledger {claimed}, and another "
                "one would spend the budget again: put that ledger back, or correct budget.ledger. Only if nothing "
                f"private was ever released from this ensemble, remove {key_of(self.ensemble)} from the anchor to "
                "create a new ledger"
            ).of(self.ledger_place)
