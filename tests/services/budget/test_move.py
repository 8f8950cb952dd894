"""Claim: a moved ledger keeps its chain, and a crash at any moment leaves at most one writable copy."""

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import Connection, inspect

from privmix.budget.chain import LedgerRow
from privmix.budget.ledger import Ledger
from privmix.budget.move import move
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reader import read, replay_whole
from privmix.budget.state import Balance, LedgerState
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.rows import every_row
from privmix.budget.verification import verify
from privmix.foundation.errors import (
    LedgerCorrupt,
    LedgerError,
    LedgerExists,
    LedgerForeign,
    LedgerMissing,
    LedgerMoved,
)
from tests.postgresql import Server
from tests.services.budget import writers
from tests.services.budget.events import COARSE, FINE
from tests.services.budget.processes import spawn
from tests.services.budget.tampering import append, tamper

COMMITS = 4  # a move reads the source, fences the source, writes the target, and reads the target


@pytest.fixture
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    """A function that returns a place of a given kind without a ledger."""
    numbers = count()

    def make(kind: str) -> str:
        if kind == "sqlite":
            return str(tmp_path / f"{next(numbers)}.db")
        server: Server = request.getfixturevalue("postgresql")
        return server.database().replace("postgres@", "postgres:hunter2@")

    return make


@pytest.fixture(params=["sqlite to postgresql", "postgresql to sqlite", "sqlite to sqlite", "postgresql to postgresql"])
def places(request: pytest.FixtureRequest, new_place: Callable[[str], str], terms: PrivacyBudget) -> tuple[str, str]:
    """A ledger of 6 rows with an open lease, and a place to move it to."""
    source, target = map(new_place, request.param.split(" to "))
    ledger = Ledger.create(source, terms)
    ledger.settle(ledger.lease(COARSE, 10).lease, 4)
    ledger.lease(FINE, 20)
    ledger.lease(COARSE, 5, "open")
    return source, target


def rows_of(place: str) -> list[LedgerRow]:
    with LedgerDatabase(place, "read").transaction() as connection:
        return list(every_row(connection))


def spent(balance: Balance) -> tuple[object, ...]:
    return balance.terms, balance.charged, balance.held


def test_the_chain_continues_at_the_target(places: tuple[str, str], terms: PrivacyBudget) -> None:
    source, target = places
    before, left = rows_of(source), read(source)
    assert move(source, target) == left
    assert rows_of(target) == before
    ledger = Ledger.open(target, terms)
    ledger.settle("open", 2)
    assert ledger.lease(COARSE, 7).count == 7
    arrived = rows_of(target)
    assert arrived[: len(before)] == before
    assert arrived[len(before)].previous == before[-1].hash
    assert verify(target, head=left.head, length=left.rows).charged == {COARSE: 13, FINE: 20}


def test_the_source_can_be_read_but_not_written(places: tuple[str, str], terms: PrivacyBudget) -> None:
    source, target = places
    writer, before = Ledger.create(source, terms), read(source)
    move(source, target)
    where = LedgerDatabase(target, "read").name
    for write in (
        lambda: writer.lease(COARSE, 1),
        lambda: writer.settle("open", 0),
        lambda: Ledger.create(source, terms),
        lambda: Ledger.open(source, terms),
    ):
        with pytest.raises(LedgerMoved) as caught:
            write()
        assert f"it was moved to {where} and continues there" in str(caught.value)
        assert "hunter2" not in str(caught.value)
    after = read(source)
    assert spent(after) == spent(before)
    assert (after.moved, after.rows) == (where, before.rows + 1)
    assert not any("hunter2" in row.body for row in rows_of(source))


def test_a_copy_that_takes_longer_than_a_charge_is_completed(
    new_place: Callable[[str], str], terms: PrivacyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the copy is read again, the transaction at the source waits."""
    source, target = new_place("postgresql"), new_place("postgresql")
    Ledger.create(source, terms).lease(COARSE, 10)

    def replay_slowly(connection: Connection) -> LedgerState:
        time.sleep(2)
        return replay_whole(connection)

    monkeypatch.setattr("privmix.database.postgresql.IDLE_TIMEOUT", "1s")
    monkeypatch.setattr("privmix.budget.move.replay_whole", replay_slowly)
    assert move(source, target).charged == {COARSE: 10}
    assert not can_be_written(source, terms)


def test_a_repeated_move_changes_nothing(places: tuple[str, str], terms: PrivacyBudget) -> None:
    source, target = places
    move(source, target)
    Ledger.create(target, terms).lease(COARSE, 1)
    left, arrived = rows_of(source), read(target)
    assert move(source, target) == arrived
    assert rows_of(source) == left


@pytest.mark.parametrize("number", range(1, COMMITS + 2))
@pytest.mark.slow
def test_no_crash_leaves_two_ledgers_and_a_repeated_move_finishes(
    places: tuple[str, str], terms: PrivacyBudget, number: int
) -> None:
    source, target = places
    before = spent(read(source))
    process, connection = spawn(writers.die_before_commit, number, source, target)
    survived = connection.poll(60) and last_message(connection) == "moved"
    process.join()
    assert survived == (number > COMMITS)
    writable = [place for place in (source, target) if can_be_written(place, terms)]
    assert writable in {1: ([source],), 2: ([source],), 3: ([],)}.get(number, ([target],))
    move(source, target)
    assert spent(read(target)) == before
    assert [place for place in (source, target) if can_be_written(place, terms)] == [target]


def last_message(connection: object) -> object:
    try:
        return connection.recv()  # type: ignore[attr-defined]
    except EOFError:
        return None


def can_be_written(place: str, terms: PrivacyBudget) -> bool:
    try:
        Ledger.open(place, terms)
    except (LedgerMoved, LedgerMissing, LedgerForeign):
        return False
    return True


def test_a_ledger_moves_to_one_place_only(places: tuple[str, str], new_place: Callable[[str], str]) -> None:
    source, target = places
    move(source, target)
    elsewhere = new_place("sqlite")
    with pytest.raises(LedgerMoved, match="before: finish that move, or move it from there"):
        move(source, elsewhere)
    assert not Path(elsewhere).exists()


def test_a_ledger_can_move_on_and_back(new_place: Callable[[str], str], terms: PrivacyBudget) -> None:
    first, second, third = new_place("sqlite"), new_place("postgresql"), new_place("sqlite")
    Ledger.create(first, terms).lease(COARSE, 10)
    noted = read(first)
    move(first, second)
    Ledger.create(second, terms).lease(COARSE, 10)
    move(second, third)
    with pytest.raises(LedgerExists):
        move(third, first)
    assert Ledger.create(third, terms).lease(COARSE, 10).count == 10
    assert verify(third, head=noted.head, length=noted.rows).charged == {COARSE: 30}


def test_a_place_with_a_ledger_is_refused(places: tuple[str, str], terms: PrivacyBudget) -> None:
    source, target = places
    Ledger.create(target, terms).lease(FINE, 1)
    for place in (target, source):
        with pytest.raises(LedgerExists, match="there is a ledger already"):
            move(source, place)
    assert read(target).charged == {FINE: 1}
    assert Ledger.create(source, terms).lease(COARSE, 1).count == 1


def test_a_tampered_ledger_is_not_moved(path: Path, terms: PrivacyBudget, postgresql: Server) -> None:
    Ledger.create(path, terms).lease(COARSE, 10)
    tamper(path, "UPDATE privmix_ledger SET body = replace(body, '10', '11') WHERE seq = 3")
    target = postgresql.database()
    with pytest.raises(LedgerCorrupt, match=f"{path}: row 3 was changed"):
        move(path, target)
    with LedgerDatabase(target, "read").transaction() as connection:
        assert inspect(connection).get_table_names() == []


def test_an_error_names_the_database_that_failed(path: Path, terms: PrivacyBudget) -> None:
    with pytest.raises(LedgerMissing, match=f"^ledger {path}: "):
        move(path, path.with_name("other.db"))
    Ledger.create(path, terms)
    nowhere = "postgresql://nobody@127.0.0.1:1/ledger"
    with pytest.raises(LedgerError, match=r"^ledger postgresql\+psycopg://nobody@127.0.0.1:1/ledger: "):
        move(path, nowhere)
    assert can_be_written(str(path), terms)


def test_a_row_written_after_the_move_is_refused(places: tuple[str, str]) -> None:
    source, target = places
    move(source, target)
    head = append(source, epoch=1, kind="lease", body='{"lease":"a","event":{},"count":1}')
    with pytest.raises(LedgerCorrupt, match=f"row {head.seq} was written after the ledger had moved"):
        read(source)
