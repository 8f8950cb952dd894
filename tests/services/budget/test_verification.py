"""Claim: a chain that several processes verify in segments has the balance and the first error of one replay."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from privmix.budget import verification
from privmix.budget.export import export
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.verification import verify
from privmix.foundation.errors import LedgerCorrupt
from privmix.foundation.progress import Display
from tests.services.budget.events import COARSE, FINE
from tests.services.budget.tampering import tamper


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privmix.budget.ledger.CHECKPOINT_ROWS", 5)
    monkeypatch.setattr(verification, "SEGMENT_ROWS", 10)


@pytest.fixture
def ledger(place: str, roomy: PrivacyBudget) -> Ledger:
    ledger = Ledger.create(place, roomy)
    for number in range(20):
        lease = ledger.lease(FINE if number % 3 else COARSE, 5).lease
        if number % 4:
            ledger.settle(lease, number % 6)
    return ledger


def exported(place: str, file: Path) -> Path:
    with file.open("w") as lines:
        export(place, lines, private=True)
    return file


def test_segments_show_the_same_as_one_replay(place: str, ledger: Ledger, tmp_path: Path) -> None:
    shown: list[float] = []

    class Recorded(Display):
        def show(self, tasks: object) -> None:
            assert isinstance(tasks, dict)
            shown.append(tasks["rows"])

    head = ledger.balance().head
    for checked in (place, exported(place, tmp_path / "rows.jsonl")):
        for workers in (1, 2):
            shown.clear()
            verified = verify(checked, head=head, length=ledger.balance().rows, workers=workers, display=Recorded())
            assert verified == ledger.balance()
            assert len(shown) > 3
            assert shown == sorted(shown)
            assert shown[-1] == 1
            with pytest.raises(LedgerCorrupt, match="no row has the hash"):
                verify(checked, head="0" * 64, workers=workers)


def test_the_first_bad_row_is_named(tmp_path: Path, path: Path, roomy: PrivacyBudget) -> None:
    ledger = Ledger.create(path, roomy)
    for _ in range(40):
        ledger.lease(COARSE, 5)
    for row in (3, 7, 12, 13, 25, 47):
        copy = tmp_path / f"{row}.db"
        shutil.copy(path, copy)
        tamper(copy, f"UPDATE privmix_ledger SET at = 'later' WHERE seq IN ({row}, 48)")
        for checked in (copy, exported(str(copy), tmp_path / f"{row}.jsonl")):
            for workers in (1, 2):
                with pytest.raises(LedgerCorrupt, match=f"row {row} was changed"):
                    verify(checked, workers=workers)
        with closing(sqlite3.connect(copy)) as connection, connection:
            connection.execute(f"DELETE FROM privmix_ledger WHERE seq = {row}")
        for workers in (1, 2):
            with pytest.raises(LedgerCorrupt, match=f"row {row} is missing"):
                verify(copy, workers=workers)
