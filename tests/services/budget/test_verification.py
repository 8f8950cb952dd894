"""Claim: the verification of a ledger has the ledger's balance and names the first bad row."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.verification import verify
from privmix.foundation.errors import LedgerCorrupt
from tests.services.budget.events import COARSE, FINE
from tests.services.budget.tampering import tamper


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privmix.budget.ledger.CHECKPOINT_ROWS", 5)


def test_a_verified_ledger_has_its_writers_balance(place: str, roomy: PrivacyBudget) -> None:
    ledger = Ledger.create(place, roomy)
    for number in range(20):
        lease = ledger.lease(FINE if number % 3 else COARSE, 5).lease
        if number % 4:
            ledger.settle(lease, number % 6)
    known = ledger.balance()
    assert verify(place, head=known.head, length=known.rows) == known
    with pytest.raises(LedgerCorrupt, match="no row has the hash"):
        verify(place, head="0" * 64)


def test_the_first_bad_row_is_named(tmp_path: Path, path: Path, roomy: PrivacyBudget) -> None:
    ledger = Ledger.create(path, roomy)
    for _ in range(40):
        ledger.lease(COARSE, 5)
    for row in (3, 7, 12, 13, 25, 47):
        copy = tmp_path / f"{row}.db"
        shutil.copy(path, copy)
        tamper(copy, f"UPDATE privmix_ledger SET at = 'later' WHERE seq IN ({row}, 48)")
        with pytest.raises(LedgerCorrupt, match=f"row {row} was changed"):
            verify(copy)
        with closing(sqlite3.connect(copy)) as connection, connection:
            connection.execute(f"DELETE FROM privmix_ledger WHERE seq = {row}")
        with pytest.raises(LedgerCorrupt, match=f"row {row} is missing"):
            verify(copy)
