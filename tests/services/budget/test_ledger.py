"""Claim: a single writer grants each token once, and grants nothing after an error.

`test_ledger_states.py` shows that a charge is on disk before its token is granted.
"""

import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError

from privmix.budget.filter import Filter
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.budget.records import Leased
from privmix.budget.statement import statement
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.schema import NUMBER_TABLE
from privmix.foundation.errors import LeaseRefused, LedgerForeign, LedgerMismatch, LedgerMissing, LedgerUnavailable
from privmix.privacy.protocols.pmixed import RatioEvent
from tests.services.budget.conftest import known
from tests.services.budget.events import COARSE, FINE
from tests.services.budget.tampering import append


def test_the_last_tokens_are_granted_and_no_more(ledger: Ledger) -> None:
    assert ledger.lease(COARSE, 201).count == 201
    last = ledger.lease(COARSE, 201)
    assert last.count == 7
    rows = ledger.balance().rows
    assert ledger.lease(COARSE, 1).count == 0
    assert ledger.balance().rows == rows, "a refusal leaves no row"
    ledger.settle(last.lease, 5)
    assert ledger.lease(COARSE, 201).count == 2


def test_a_repeated_lease_is_granted_once(ledger: Ledger, place: str, terms: PrivacyBudget) -> None:
    first = ledger.lease(COARSE, 10, "mine")
    assert ledger.lease(COARSE, 10, "mine") == first
    assert Ledger.create(place, terms).lease(COARSE, 10, "mine") == first
    assert read(place).charged == {COARSE: 10}


def test_a_lease_name_cannot_be_reused_for_another_lease(ledger: Ledger) -> None:
    ledger.lease(COARSE, 10, "mine")
    with pytest.raises(LeaseRefused, match="another event"):
        ledger.lease(FINE, 10, "mine")
    ledger.settle("mine", 3)
    with pytest.raises(LeaseRefused, match="settled"):
        ledger.lease(COARSE, 10, "mine")


def test_impossible_requests_are_refused_and_change_nothing(ledger: Ledger) -> None:
    """`test_ledger_states.py` repeats and contradicts settlements."""
    ledger.lease(COARSE, 10, "mine")
    for wanted in (0, -1, 2**31):
        with pytest.raises(LeaseRefused, match="a lease holds 1 to"):
            ledger.lease(COARSE, wanted)
    for lease, used, message in (("mine", 11, "of 10 tokens"), ("mine", -1, "cannot have"), ("other", 0, "no lease")):
        with pytest.raises(LeaseRefused, match=message):
            ledger.settle(lease, used)
    assert ledger.balance().charged == ledger.balance().held == {COARSE: 10}


def test_an_exhausted_budget_is_healthy(ledger: Ledger) -> None:
    """Clients then get 429, or answers without private text, as configured: nothing that a restart would mend."""
    ledger.lease(COARSE, 10_000)
    assert ledger.lease(COARSE, 1).count == 0
    ledger.check()


@pytest.mark.parametrize(
    ("field", "value"),
    [("ensemble", "other"), ("epsilon", 9.0), ("epsilon", 7.0), ("delta", 1e-6), ("order", 9.0), ("adjacency", "user")],
)
def test_another_promise_is_refused_with_the_difference(
    ledger: Ledger, place: str, terms: PrivacyBudget, field: str, value: object
) -> None:
    ledger.lease(COARSE, 10)
    kept = read(place)
    with pytest.raises(LedgerMismatch, match=rf"{field} is {getattr(terms, field)!r} there and {value!r} here"):
        Ledger.create(place, terms.model_copy(update={field: value}))
    assert read(place) == kept
    assert ledger.lease(COARSE, 1).count == 1, "a refused attempt does not fence the writer"


def test_a_ledger_whose_tokens_cost_more_than_its_budget_states_their_cost(place: str, terms: PrivacyBudget) -> None:
    """As after a correction of an analysis: 267 tokens of COARSE cost more than the budget of 8."""
    Ledger.create(place, terms)
    record = Leased(lease="old", event=COARSE.as_dict(), count=267)
    append(place, epoch=1, kind="lease", body=record.model_dump_json())
    ledger = Ledger.create(place, terms)
    assert ledger.lease(COARSE, 1).count == 0
    stated = statement(ledger.balance())
    assert (stated.exhausted, stated.tokens_left) == (True, 0)
    assert known(stated.epsilon_bound) > 8
    assert "more than the budget of 8, which is exhausted." in stated.guarantee
    assert "(8, 1e-05)" not in stated.guarantee, "the statement must not repeat the exceeded promise"
    cost, client = Filter(terms).epsilon(ledger.balance().charged), stated.client()
    assert known(client.epsilon) >= cost
    assert (known(client.epsilon), client.epsilon_left) == (known(stated.epsilon_bound), 0.0)
    ledger.settle("old", 100)
    assert ledger.lease(COARSE, 1).count == 1, "unreleased tokens come back"
    assert "exhausted" not in statement(ledger.balance()).guarantee
    assert statement(ledger.balance()).epsilon == 8


def test_an_unknown_event_stops_the_ledger(ledger: Ledger, place: str, terms: PrivacyBudget) -> None:
    ledger.lease(COARSE, 10)
    append(place, epoch=1, kind="lease", body='{"lease":"a","event":{"kind":"not-yet-known"},"count":1}')
    with pytest.raises(LedgerForeign, match=r"row 4 has an event that this version does not know.*not-yet-known"):
        Ledger.create(place, terms)


def test_an_event_that_does_not_survive_storage_is_not_written(ledger: Ledger) -> None:
    class Forgetful(RatioEvent):
        kind = "test-forgetful"

        def to_json(self) -> str:
            return COARSE.to_json()

    with pytest.raises(LeaseRefused, match="could not be read again"):
        ledger.lease(Forgetful(8, 0.25, 0.1), 1)
    assert ledger.lease(COARSE, 1).count == 1


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("sqlite://", LedgerMissing, "in memory"),
        ("sqlite:///:memory:", LedgerMissing, "in memory"),
        ("sqlite:///ledger.db?mode=memory", LedgerMissing, "names no file"),
        ("mysql://host/ledger", LedgerForeign, "must be in SQLite or PostgreSQL, not in mysql"),
        ("://", LedgerMissing, "neither a path nor a database URL"),
        ("/", LedgerForeign, "is a directory"),
    ],
)
def test_places_that_cannot_store_a_ledger_are_refused(
    terms: PrivacyBudget, name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Ledger.create(name, terms)


def test_a_ledger_locked_by_another_writer_is_unavailable(
    ledger: Ledger, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privmix.database.sqlite.BUSY_TIMEOUT", 0.05)
    monkeypatch.setattr("privmix.database.postgresql.LOCK_TIMEOUT", "50ms")
    with LedgerDatabase(place, "write").transaction():
        with pytest.raises(LedgerUnavailable, match=r"another (writer|process) has locked it"):
            ledger.lease(COARSE, 1)
        assert not read(place).charged, "readers do not wait for a lock"
    assert ledger.lease(COARSE, 1).count == 1


ROW = "SELECT * FROM privmix_ledger WHERE seq = 3"
CHANGES = {
    "sqlite": [
        f"REPLACE INTO privmix_ledger {ROW}",
        "INSERT INTO privmix_ledger SELECT 9, epoch, kind, body, at, previous, hash FROM privmix_ledger WHERE seq = 3",
    ],
    "postgresql": [
        "UPDATE privmix_ledger SET body = '{}' WHERE false",
        "TRUNCATE privmix_ledger",
        f"INSERT INTO privmix_ledger {ROW} ON CONFLICT (seq) DO UPDATE SET body = '{{}}'",
    ],
}


def test_the_table_is_append_only(ledger: Ledger, place: str) -> None:
    ledger.lease(COARSE, 10)
    url = place.replace("postgresql:", "postgresql+psycopg:") if "://" in place else f"sqlite:///{place}"
    everywhere = ["UPDATE privmix_ledger SET body = '{}'", "DELETE FROM privmix_ledger WHERE seq = 3"]
    for change in [*everywhere, *CHANGES[url.partition(":")[0].partition("+")[0]]]:
        with pytest.raises(DBAPIError, match="append-only"), create_engine(url).begin() as connection:
            connection.exec_driver_sql(change)
    assert read(place) == ledger.balance()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (f"DROP TABLE {NUMBER_TABLE}", f"layout is unknown: restore the table {NUMBER_TABLE}"),
        (f"DELETE FROM {NUMBER_TABLE}", "layout unknown"),
        (f"UPDATE {NUMBER_TABLE} SET number = 9", r"layout 9.* knows layout 1 alone: use the version that wrote it"),
    ],
)
def test_a_ledger_of_another_layout_is_refused(
    ledger: Ledger, place: str, terms: PrivacyBudget, change: str, problem: str
) -> None:
    with LedgerDatabase(place, "write").transaction() as connection:
        connection.exec_driver_sql(change)
    for use in (lambda: Ledger.create(place, terms), lambda: Ledger.open(place, terms), lambda: read(place)):
        with pytest.raises(LedgerForeign, match=problem):
            use()
