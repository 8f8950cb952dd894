"""Claim: a ledger in a SQLite file waits for the disk, and refuses missing, replaced, damaged and foreign files."""

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.foundation.errors import LedgerCorrupt, LedgerForeign, LedgerMissing
from tests.services.budget.events import COARSE


@pytest.fixture
def ledger(path: Path, terms: PrivacyBudget) -> Ledger:
    return Ledger.create(path, terms)


def test_commits_wait_for_the_disk(ledger: Ledger) -> None:
    with ledger._database.transaction() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("synchronous", "journal_mode")
        }
    assert pragmas == {"synchronous": 2, "journal_mode": "wal"}


def test_the_error_names_a_missing_directory_or_file(tmp_path: Path, terms: PrivacyBudget) -> None:
    with pytest.raises(LedgerMissing, match=f"there is no directory {tmp_path / 'none'}"):
        Ledger.create(tmp_path / "none" / "ledger.db", terms)
    with pytest.raises(LedgerMissing, match="put it back"):
        Ledger.open(tmp_path / "ledger.db", terms)
    with pytest.raises(LedgerMissing, match="no such file"):
        read(tmp_path / "ledger.db")
    assert not list(tmp_path.iterdir())


def test_a_ledger_deleted_during_use_is_not_recreated(ledger: Ledger, path: Path) -> None:
    ledger.lease(COARSE, 10)
    path.unlink()
    with pytest.raises(LedgerMissing, match="put it back"):
        ledger.lease(COARSE, 10)
    assert not path.exists()


def test_other_files_are_refused_and_not_changed(path: Path, terms: PrivacyBudget) -> None:
    path.write_bytes(b"a letter, and not a database " * 100)
    with pytest.raises(LedgerForeign, match="not a SQLite file"):
        Ledger.create(path, terms)
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    kept = path.read_bytes()
    with pytest.raises(LedgerForeign, match="another application; it has a table 'recipes'"):
        Ledger.create(path, terms)
    with pytest.raises(LedgerForeign, match="no privmix ledger"):
        read(path)
    assert path.read_bytes() == kept


def test_a_damaged_file_is_refused(ledger: Ledger, path: Path, terms: PrivacyBudget) -> None:
    ledger.lease(COARSE, 10)
    damaged = bytearray(path.read_bytes())
    damaged[200:] = b"\xff" * (len(damaged) - 200)
    path.write_bytes(damaged)
    with pytest.raises((LedgerCorrupt, LedgerForeign)):
        Ledger.create(path, terms)


def test_a_path_and_its_url_are_one_ledger(ledger: Ledger, path: Path) -> None:
    ledger.lease(COARSE, 10)
    assert read(f"sqlite:///{path}") == read(path) == read(str(path))


def test_file_names_may_have_special_characters(tmp_path: Path, terms: PrivacyBudget) -> None:
    path = tmp_path / "50% of what? #1 &mode=ro.db"
    Ledger.create(path, terms).lease(COARSE, 1)
    assert read(path).charged == Counter({COARSE: 1})
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
