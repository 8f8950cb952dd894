"""Claim: a new deployment takes the ledger over with its first charge; if it ends, the old one takes it back."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection

from privmix.budget import ledger as module
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read, verify
from privmix.budget.store.database import LedgerDatabase
from privmix.foundation.errors import Fenced
from tests.services.budget.events import COARSE


@pytest.fixture
def old(place: str, roomy: PrivacyBudget) -> Ledger:
    """The ledger of a serving deployment."""
    ledger = Ledger.create(place, roomy, holder="old")
    ledger.lease(COARSE, 10)
    return ledger


def test_a_starting_deployment_does_not_take_the_ledger_over(old: Ledger, place: str, roomy: PrivacyBudget) -> None:
    new = Ledger.create(place, roomy, holder="new")
    rows = read(place).rows
    new.check()
    assert read(place).rows == rows
    assert old.lease(COARSE, 10).count == 10
    old.check()
    assert read(place).epoch == 1


def test_the_first_charge_takes_the_ledger_over_with_every_token(old: Ledger, place: str, roomy: PrivacyBudget) -> None:
    new = Ledger.create(place, roomy, holder="new")
    kept = old.lease(COARSE, 10).lease
    assert new.lease(COARSE, 5).count == 5
    for write in (lambda: old.lease(COARSE, 1), old.check):
        with pytest.raises(Fenced, match="continues once the other deployment has ended"):
            write()
    new.settle(kept, 4)
    assert read(place).charged == {COARSE: 10 + 4 + 5} == new.balance().charged


def test_the_old_deployment_takes_the_ledger_back_after_the_new_one_ends(
    old: Ledger, place: str, roomy: PrivacyBudget
) -> None:
    new = Ledger.create(place, roomy, holder="new")
    new.lease(COARSE, 5)
    new.give_up()
    old.check()
    assert read(place).epoch == 2, "a check does not take the ledger over"
    assert old.lease(COARSE, 3).count == 3
    with pytest.raises(Fenced):
        new.lease(COARSE, 1)
    assert verify(place).charged == {COARSE: 18}


def test_the_old_deployment_takes_the_ledger_back_from_a_silent_one(
    old: Ledger, place: str, roomy: PrivacyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Ledger.create(place, roomy, holder="new")
    new.lease(COARSE, 5)
    new.beat()
    with pytest.raises(Fenced):
        old.lease(COARSE, 1)
    monkeypatch.setattr(module, "PATIENCE_S", -1.0)  # every heartbeat counts as too old
    assert old.lease(COARSE, 3).count == 3
    monkeypatch.undo()
    with pytest.raises(Fenced):  # whatever a wrong clock said of it
        new.lease(COARSE, 1)
    assert verify(place).charged == {COARSE: 18}


def test_a_heartbeat_of_a_replaced_writer_is_ignored(old: Ledger, place: str, roomy: PrivacyBudget) -> None:
    new = Ledger.create(place, roomy, holder="new")
    new.lease(COARSE, 5)
    new.give_up()
    old.beat()
    new.beat()
    assert old.lease(COARSE, 1).count == 1, "the new deployment has ended, in spite of its late heartbeat"


def test_a_restarted_process_replaces_its_predecessor(
    old: Ledger, place: str, roomy: PrivacyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarted = Ledger.create(place, roomy, holder="old")
    restarted.resume()
    assert read(place).epoch == 2
    assert restarted.lease(COARSE, 1).count == 1
    monkeypatch.setattr(module, "PATIENCE_S", -1.0)  # every heartbeat counts as too old
    with pytest.raises(Fenced, match="must not write again"):
        old.lease(COARSE, 1)


def test_a_restarted_process_of_a_starting_deployment_takes_nothing(
    old: Ledger, place: str, roomy: PrivacyBudget
) -> None:
    Ledger.create(place, roomy, holder="new").resume()
    assert old.lease(COARSE, 1).count == 1


def test_a_restarted_process_of_a_replaced_deployment_waits(old: Ledger, place: str, roomy: PrivacyBudget) -> None:
    new = Ledger.create(place, roomy, holder="new")
    new.lease(COARSE, 5)
    restarted = Ledger.create(place, roomy, holder="old")
    with pytest.raises(Fenced):
        restarted.take_over()
    new.give_up()
    assert restarted.lease(COARSE, 1).count == 1


def test_concurrent_deployments_do_not_take_turns(place: str, roomy: PrivacyBudget) -> None:
    ledgers = [Ledger.create(place, roomy, holder=name) for name in "abc"]

    def write(ledger: Ledger) -> int:
        granted = 0
        for _ in range(30):
            try:
                granted += ledger.lease(COARSE, 1).count
            except Fenced:
                continue
        return granted

    with ThreadPoolExecutor(3) as pool:
        granted = sum(pool.map(write, ledgers))
    assert verify(place).charged == {COARSE: granted}
    assert read(place).epoch == 3


def test_an_unconfirmed_takeover_belongs_to_its_writer(place: str, roomy: PrivacyBudget) -> None:
    ledger, database = Ledger.create(place, roomy, holder="only"), LedgerDatabase.transaction

    @contextmanager
    def unconfirmed(self: LedgerDatabase) -> Iterator[Connection]:
        with database(self) as connection:
            yield connection
        raise ConnectionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LedgerDatabase, "transaction", unconfirmed)
        with pytest.raises(ConnectionError):
            ledger.lease(COARSE, 5, "mine")
    assert ledger.lease(COARSE, 5, "mine").count == 5
    assert (read(place).charged, read(place).epoch) == ({COARSE: 5}, 1)
