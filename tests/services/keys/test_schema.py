"""Claim: keys of another layout are refused. Keys and a ledger fit into one database."""

from pathlib import Path

import pytest

from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.database.service import NUMBER_TABLE, ServiceDatabase
from privmix.foundation.errors import KeysUnavailable
from privmix.keys.store import KeyStore
from tests.postgresql import Server


def test_keys_of_another_layout_are_refused(tmp_path: Path) -> None:
    with ServiceDatabase(tmp_path / "keys.db").transaction() as connection:
        connection.exec_driver_sql(f"UPDATE {NUMBER_TABLE} SET number = 9")
    with pytest.raises(KeysUnavailable, match=r"keys .*layout 9.*use the version that wrote it"):
        ServiceDatabase(tmp_path / "keys.db")


def test_keys_and_a_ledger_fit_into_one_database(postgresql: Server) -> None:
    url = postgresql.database()
    terms = PrivacyBudget(ensemble="clinic", epsilon=8.0, delta=1e-5, order=8.0, adjacency="one part added or removed")
    Ledger.create(url, terms)
    KeyStore(ServiceDatabase(url)).create("k")
    assert KeyStore(ServiceDatabase(url)).required()
    Ledger.create(url, terms)
