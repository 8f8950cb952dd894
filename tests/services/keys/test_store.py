"""Claim: keys are found only by their secrets, and shares are charged exactly to the token."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import update

from privmix.budget.ledger import Ledger
from privmix.database.service import NUMBER_TABLE, ServiceDatabase, keys_table
from privmix.foundation.errors import KeysError, KeysUnavailable
from privmix.keys.records import Secret, Share
from privmix.keys.reservations import Exhausted
from tests.key_store import RequestStore
from tests.postgresql import Server
from tests.support.terms import CLINIC


def test_a_secret_has_32_random_bytes_and_is_never_stored(store: RequestStore, place: str) -> None:
    key, secret = store.create("team")
    assert len(secret.text) == len("pmx_") + 43
    assert secret.text not in repr(secret)
    assert store.find(secret.hash) == key
    stored = b"".join(file.read_bytes() for file in Path(place).parent.iterdir())
    assert secret.text.encode() not in stored
    assert secret.text.removeprefix("pmx_").encode() not in stored
    assert secret.hash.encode() in stored


def test_a_service_with_keys_needs_them_even_when_all_are_revoked(store: RequestStore) -> None:
    assert not store.required()
    store.create("only")
    store.revoke("only")
    assert store.required()


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_an_id_is_never_taken_for_the_name_of_another_key(
    place: str, database: str, request: pytest.FixtureRequest
) -> None:
    if database == "postgresql":
        server: Server = request.getfixturevalue("postgresql")
        place = server.database()
    service = ServiceDatabase(place)
    store = RequestStore(service)
    imitator, _ = store.create("imitator")
    meant, secret = store.create("meant")
    with pytest.raises(KeysError, match="form of a key's id"):
        store.create(meant.id)
    with service.transaction() as connection:  # as only a writer of the table can
        connection.execute(update(keys_table).where(keys_table.c.id == imitator.id).values(name=meant.id))
    assert store.account(meant.id).key == meant
    store.limit(meant.id, Share(tokens=1))
    assert store.account(meant.id).key.share.tokens == 1
    assert store.revoke(meant.id).id == meant.id
    assert store.account(imitator.id).key.revoked is None
    revoked = store.find(secret.hash)
    assert revoked is not None
    assert revoked.revoked is not None


def test_a_rotated_secret_stays_valid_for_its_grace_period(store: RequestStore) -> None:
    key, first = store.create("team")
    _, second = store.rotate("team", timedelta(hours=1))
    assert store.find(first.hash) is not None
    assert store.find(second.hash) is not None
    _, third = store.rotate("team")
    assert store.find(first.hash) is None
    assert store.find(second.hash) is None
    rotated = store.find(third.hash)
    assert rotated is not None
    assert rotated.id == key.id


def test_keys_expire_and_are_revoked(store: RequestStore) -> None:
    key, secret = store.create("brief", expires=datetime.now(UTC) + timedelta(seconds=60))
    assert key.valid(datetime.now(UTC))
    assert not key.valid(datetime.now(UTC) + timedelta(seconds=61))
    store.revoke("brief")
    revoked = store.find(secret.hash)
    assert revoked is not None
    assert not revoked.valid(datetime.now(UTC))
    with pytest.raises(KeysError, match="revoked"):
        store.rotate("brief")
    assert store.find(Secret.new().hash) is None


def test_a_share_is_charged_before_a_request_and_corrected_afterwards(store: RequestStore) -> None:
    key, _ = store.create("team", share=Share(tokens=20))
    assert store.reserve("a", key.id, 15, 1, "gateway") == 15
    assert store.reserve("a", key.id, 15, 1, "gateway") == 15, "a repeated call"
    assert store.account("team").usage.held == 15
    assert store.reserve("b", key.id, 10, 1, "gateway") == Exhausted(held=True), "it may return tokens"
    store.settle("a", 4)
    store.settle("a", 4)
    assert store.reserve("b", key.id, 18, 1, "gateway") == 16, "the rest of the share"
    store.settle("b", None)
    assert store.reserve("c", key.id, 1, 1, "gateway") == Exhausted(held=False)
    usage = store.account("team").usage
    assert (usage.spent, usage.held) == (20, 0)


def test_a_share_can_be_changed_after_it_was_used(store: RequestStore) -> None:
    key, _ = store.create("team", share=Share(tokens=2))
    store.reserve("a", key.id, 2, 1, "g")
    store.settle("a", 2)
    store.limit("team", Share(tokens=1))
    assert store.reserve("b", key.id, 1, 1, "g") == Exhausted(held=False)
    store.limit("team", Share())
    assert store.reserve("b", key.id, 5, 1, "g") == 5
    store.settle("b", 6)
    assert store.account("team").usage.spent == 7, "no more than was reserved"


def test_the_spent_part_of_each_share_is_told_of_keys_that_are_not_revoked(store: RequestStore) -> None:
    for name, share in {"a": Share(tokens=8), "b": Share(live_streams=1), "gone": Share(tokens=9)}.items():
        key, _ = store.create(name, share=share)
        store.reserve(name, key.id, 2, 1, "g")
        store.settle(name, 2)
    store.create("unused", share=Share(tokens=5))
    store.revoke("gone")
    assert store.spent_ratios() == {"a": 0.25, "unused": 0.0}


def test_keys_of_another_layout_are_refused(store: RequestStore, place: str) -> None:
    with ServiceDatabase(place).transaction() as connection:
        connection.exec_driver_sql(f"UPDATE {NUMBER_TABLE} SET number = 9")
    with pytest.raises(KeysUnavailable, match=r"keys .*layout 9.*use the version that wrote it"):
        ServiceDatabase(place)


def test_keys_and_a_ledger_fit_into_one_database(postgresql: Server) -> None:
    url = postgresql.database()
    for _ in range(2):
        Ledger.create(url, CLINIC)
        store = RequestStore(ServiceDatabase(url))
    store.create("k")
    assert store.required()
