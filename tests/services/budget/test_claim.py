"""Claim: where an anchor survives, an ensemble whose receipt and ledger are lost gets no second ledger."""

from pathlib import Path

import pytest

from privmix.budget.anchor import anchor_at
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.receipt import FILE, Receipt, anchors_of, begin, verified_ledger_id
from privmix.foundation.errors import LedgerRolledBack, LedgerUnknown
from tests.services.budget.events import COARSE


def lose(ensemble: Path, path: Path) -> None:
    """Loses the receipt and the ledger, as a volume that is restored to before the first start does."""
    (ensemble / FILE).unlink(missing_ok=True)
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def spend(path: Path, terms: PrivacyBudget, ensemble: Path, anchor: str, tokens: int = 10) -> int:
    return Ledger.open(path, terms, anchors=anchors_of(ensemble, anchor)).lease(COARSE, tokens).count


def test_an_ensemble_whose_ledger_an_anchor_knows_gets_no_other(
    path: Path, terms: PrivacyBudget, ensemble: Path, second: str
) -> None:
    begun = begin(str(path), terms, ensemble, anchor=second)
    assert spend(path, terms, ensemble, second) == 10
    lose(ensemble, path)
    for _ in range(2):
        with pytest.raises(LedgerUnknown, match=f"{begun.ledger}.*back"):
            begin(str(path), terms, ensemble, anchor=second)
    assert not path.exists()
    assert Receipt.load(ensemble) is None, "a receipt of another ledger would refuse the one that is put back"
    other = terms.model_copy(update={"ensemble": "court"})
    assert begin(str(path), other, ensemble, anchor=second).new, "another ensemble may have its own"


def test_an_ensemble_keeps_its_ledger_where_its_receipt_alone_is_lost(
    path: Path, terms: PrivacyBudget, ensemble: Path, second: str
) -> None:
    begun = begin(str(path), terms, ensemble, anchor=second)
    (ensemble / FILE).unlink()
    again = begin(str(path), terms, ensemble, anchor=second)
    assert (again.ledger, again.new) == (begun.ledger, False)


def test_another_ledger_at_the_place_is_not_recorded(
    path: Path, tmp_path: Path, terms: PrivacyBudget, ensemble: Path, second: str
) -> None:
    begun = begin(str(path), terms, ensemble, anchor=second)
    lose(ensemble, path)
    other = Ledger.create(path, terms).balance().id
    with pytest.raises(LedgerUnknown, match="back"):
        begin(str(path), terms, ensemble, anchor=second)
    assert Receipt.load(ensemble) is None
    assert anchor_at(second).read(other) is None, "an anchor that knows it would accept it"
    Receipt(ledger=other).save(ensemble)
    Ledger.create(path, terms, anchors=anchors_of(ensemble, second))
    with pytest.raises(LedgerUnknown, match=f"{begun.ledger}.*back"):
        verified_ledger_id(str(path), terms, ensemble, anchor=second)


def test_a_volume_restored_to_the_middle_of_the_beginning_gets_no_fresh_budget(
    path: Path, terms: PrivacyBudget, ensemble: Path, second: str
) -> None:
    begun = begin(str(path), terms, ensemble, anchor=second)
    spend(path, terms, ensemble, second)
    lose(ensemble, path)
    Receipt(ledger=begun.ledger, begun=False).save(ensemble)
    with pytest.raises(LedgerRolledBack, match="privmix ledger forfeit"):
        begin(str(path), terms, ensemble, anchor=second)


def test_a_ledger_whose_deployment_names_an_anchor_later_is_claimed(
    path: Path, terms: PrivacyBudget, ensemble: Path, second: str
) -> None:
    begun = begin(str(path), terms, ensemble)
    assert begin(str(path), terms, ensemble, anchor=second).ledger == begun.ledger
    lose(ensemble, path)
    with pytest.raises(LedgerUnknown, match=begun.ledger):
        begin(str(path), terms, ensemble, anchor=second)
