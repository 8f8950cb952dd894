"""Claim: a new kind of database needs only one class and one line in `BACKENDS`."""

from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reader import read
from privmix.database import database
from privmix.database.backend import Backend
from privmix.database.sqlite import SQLite
from tests.services.budget.events import COARSE


class Suffixed(SQLite):
    """Stores ledgers in SQLite files with a suffix, under its own URL scheme."""

    name = "suffixed files"
    schemes = ("suffixed",)

    def location(self, url: URL) -> URL:
        return super().location(url.set(database=f"{url.database}.suffixed"))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Backend:
    backend = Suffixed()
    monkeypatch.setattr(database, "BACKENDS", (*database.BACKENDS, backend))
    return backend


@pytest.mark.usefixtures("registered")
def test_a_new_backend_keeps_a_ledger(terms: PrivacyBudget, tmp_path: Path) -> None:
    place = f"suffixed:///{tmp_path}/ledger"
    ledger = Ledger.create(place, terms)
    ledger.settle(ledger.lease(COARSE, 10).lease, 4)
    assert read(place).charged == {COARSE: 4}
    assert (tmp_path / "ledger.suffixed").exists()
