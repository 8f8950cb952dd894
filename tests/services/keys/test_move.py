"""Claim: keys move to another database, however long the copy takes."""

import pytest

from privmix.database.service import ServiceDatabase
from privmix.keys.move import move_keys
from privmix.keys.records import Share
from privmix.keys.subjects import subjects_of
from tests.key_store import RequestStore
from tests.postgresql import Server

_SLOW = "CREATE FUNCTION slow() RETURNS trigger AS 'BEGIN PERFORM pg_sleep(2); RETURN NEW; END' LANGUAGE plpgsql"
_INSERTS = "CREATE TRIGGER slow BEFORE INSERT ON privmix_keys FOR EACH STATEMENT EXECUTE FUNCTION slow()"


def test_a_copy_that_takes_longer_than_a_request_is_completed(
    postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rows are written to the target, the transaction at the source waits."""
    here, there = postgresql.database(), postgresql.database()
    store = RequestStore(ServiceDatabase(here))
    key, secret = store.create("team", share=Share(tokens=9))
    store.reserve("a", subjects_of(key), 4, 1, "gateway")
    ServiceDatabase(there)
    with postgresql.connect(there) as connection:
        connection.execute(_SLOW)
        connection.execute(_INSERTS)
    monkeypatch.setattr("privmix.database.postgresql.STATEMENT_TIMEOUT", "1s")
    monkeypatch.setattr("privmix.database.postgresql.IDLE_TIMEOUT", "1s")
    assert move_keys(here, there) == 1
    moved = RequestStore(ServiceDatabase(there))
    assert moved.find(secret.hash) == key
    assert moved.account("team") == store.account("team")
