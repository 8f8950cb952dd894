"""Provides a database of keys in a SQLite file."""

from pathlib import Path

import pytest

from privmix.database.service import ServiceDatabase
from tests.key_store import RequestStore


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "keys.db")


@pytest.fixture
def store(place: str) -> RequestStore:
    return RequestStore(ServiceDatabase(place))
