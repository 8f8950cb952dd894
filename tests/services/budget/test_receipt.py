"""Claim: an ensemble's ledger is created once, explicitly, and the service accepts no other in its place."""

import os
import shutil
from pathlib import Path

import pytest

from privmix.budget import receipt
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.budget.receipt import FILE, Receipt, anchors_of, begin, is_fresh, verified_ledger_id
from privmix.foundation.errors import (
    LedgerForeign,
    LedgerMismatch,
    LedgerMissing,
    LedgerRolledBack,
    LedgerUnavailable,
    LedgerUnknown,
)
from tests.postgresql import Server
from tests.services.budget import writers
from tests.services.budget.conftest import die_at_creation
from tests.services.budget.events import COARSE
from tests.services.budget.processes import answer


def test_a_ledger_is_begun_once_and_then_recognized(place: str, terms: PrivacyBudget, ensemble: Path) -> None:
    assert is_fresh(place, ensemble)
    begun = begin(place, terms, ensemble)
    assert begun.new
    assert not is_fresh(place, ensemble)
    assert (stored := Receipt.load(ensemble)) is not None
    assert (stored.ledger, stored.begun) == (begun.ledger, True)
    assert read(place).id == verified_ledger_id(place, terms, ensemble) == begun.ledger
    again = begin(place, terms, ensemble)
    assert (again.ledger, again.new) == (begun.ledger, False)
    assert [file.name for file in ensemble.glob("[!.]*")] == [FILE]


def test_without_a_receipt_no_ledger_is_recognized(place: str, terms: PrivacyBudget, ensemble: Path) -> None:
    with pytest.raises(LedgerUnknown, match="privmix ledger init"):
        verified_ledger_id(place, terms, ensemble)
    Ledger.create(place, terms)
    with pytest.raises(LedgerUnknown, match="privmix ledger init"):
        verified_ledger_id(place, terms, ensemble)
    assert not is_fresh(place, ensemble), "the operator must confirm an existing ledger"
    begun = begin(place, terms, ensemble)
    assert (begun.new, begun.ledger) == (False, read(place).id)
    assert verified_ledger_id(place, terms, ensemble) == begun.ledger


def test_a_place_without_the_ensembles_ledger_is_refused(
    place: str, terms: PrivacyBudget, ensemble: Path, tmp_path: Path
) -> None:
    begun = begin(place, terms, ensemble)
    empty, another = str(tmp_path / "empty.db"), str(tmp_path / "another.db")
    Ledger.create(another, terms)
    for refuse in (verified_ledger_id, begin):
        with pytest.raises(LedgerMissing, match=r"put it back, or correct budget\.ledger"):
            refuse(empty, terms, ensemble)
        with pytest.raises(LedgerMismatch, match=f"this ensemble's is {begun.ledger}"):
            refuse(another, terms, ensemble)
    assert not Path(empty).exists()


@pytest.mark.parametrize("statement", ["DROP TABLE privmix_ledger, privmix_ledger_schema", "DROP TABLE privmix_ledger"])
def test_an_emptied_database_is_refused(
    postgresql: Server, terms: PrivacyBudget, ensemble: Path, statement: str
) -> None:
    url = postgresql.database()
    begin(url, terms, ensemble)
    with postgresql.connect(url) as connection:
        connection.execute(statement)
    for refuse in (verified_ledger_id, begin):
        with pytest.raises((LedgerMissing, LedgerForeign), match="put it back"):
            refuse(url, terms, ensemble)
    with pytest.raises((LedgerMissing, LedgerForeign)):
        Ledger.open(url, terms)
    with postgresql.connect(url) as connection:
        count = connection.execute("SELECT count(*) FROM pg_tables WHERE tablename = 'privmix_ledger'").fetchone()
    assert count == (0,)


def test_nothing_is_granted_while_the_ensembles_directory_is_read_only(
    terms: PrivacyBudget, public_directory: Path
) -> None:
    """An older copy of the ledger would be accepted later, because the receipt does not know the grants."""
    ensemble, place = public_directory / "ensemble", public_directory / "ledger.db"
    ensemble.mkdir()
    if os.geteuid() == 0:
        shutil.chown(ensemble, writers.NOBODY)
    told = answer(writers.meet_a_read_only_ensemble, str(place), terms, ensemble)
    begun, before, meanwhile, after = told[0], told[1:7], told[7:13], told[13:]
    assert before == after == [2, None] * 3
    assert {type(each) for each in (begun, *meanwhile)} == {LedgerUnavailable}
    assert "ledger.receipt cannot be written" in str(meanwhile[0])
    assert sum(read(place).charged.values()) <= 2 * (6 + 2), "refused tokens are charged once by each writer"
    verified_ledger_id(str(place), terms, ensemble)


def test_beside_another_anchor_the_receipt_of_a_read_only_directory_stays(
    terms: PrivacyBudget, ensemble: Path, path: Path, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept.db"
    begin(str(path), terms, ensemble, anchor=second)
    stored = Receipt.load(ensemble)
    monkeypatch.setattr(receipt, "is_writable", lambda directory: False)
    anchors = anchors_of(ensemble, second)
    shutil.copy(path, kept)
    assert Ledger.open(path, terms, anchors=anchors).lease(COARSE, 2).count == 2
    assert Receipt.load(ensemble) == stored
    verified_ledger_id(str(path), terms, ensemble, anchor=second)
    with pytest.raises(LedgerRolledBack):
        verified_ledger_id(str(kept), terms, ensemble, anchor=second)


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("made", [False, True])
def test_an_interrupted_beginning_continues(
    place: str,
    terms: PrivacyBudget,
    ensemble: Path,
    second: str,
    monkeypatch: pytest.MonkeyPatch,
    made: bool,
    anchored: bool,
) -> None:
    anchor = second if anchored else None
    with monkeypatch.context() as dying:
        die_at_creation(dying, made)
        with pytest.raises(KeyboardInterrupt):
            begin(place, terms, ensemble, anchor=anchor)
    assert (promised := Receipt.load(ensemble)) is not None
    assert not promised.begun
    with pytest.raises(LedgerUnknown, match="interrupted"):
        verified_ledger_id(place, terms, ensemble, anchor=anchor)
    assert begin(place, terms, ensemble, anchor=anchor).ledger == promised.ledger
    assert verified_ledger_id(place, terms, ensemble, anchor=anchor) == promised.ledger


def test_the_error_names_an_unreadable_receipt(place: str, terms: PrivacyBudget, ensemble: Path) -> None:
    (ensemble / FILE).write_text("{")
    with pytest.raises(LedgerForeign, match=FILE):
        begin(place, terms, ensemble)
