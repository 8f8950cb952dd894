"""Claim: a start replays only the rows after the last checkpoint, and the whole chain can still be verified."""

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from privmix.budget import state
from privmix.budget.filter import Filter
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read, replay, verify
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.rows import last_checkpoint
from privmix.foundation.errors import LeaseRefused, LedgerCorrupt
from privmix.privacy.protocols.submix import SubMixEvent
from tests.services.budget.events import COARSE, FINE
from tests.services.budget.tampering import append, stored, tamper

EVERY = 10  # rows between two checkpoints in these tests
SUBMIX = SubMixEvent(parts=2, order=8.0, beta=0.01)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privmix.budget.ledger.CHECKPOINT_ROWS", EVERY)


@pytest.fixture
def ledger(place: str, roomy: PrivacyBudget) -> Ledger:
    return Ledger.create(place, roomy)


def write(ledger: Ledger, leases: int) -> None:
    """Leases tokens of two events and settles every second lease."""
    for number in range(leases):
        lease = ledger.lease(FINE if number % 3 else COARSE, 5, f"lease-{ledger.balance().rows}").lease
        if number % 2:
            ledger.settle(lease, number % 6)


def test_a_start_from_a_checkpoint_has_the_state_of_a_full_replay(
    ledger: Ledger, place: str, roomy: PrivacyBudget
) -> None:
    write(ledger, 40)
    rows = stored(place)
    checkpoints = [row.seq for row in rows if row.kind == "checkpoint"]
    assert len(checkpoints) > 4
    with LedgerDatabase(place, "read").transaction() as connection:
        assert last_checkpoint(connection) == checkpoints[-1]
        from_checkpoint = replay(connection)
    whole = state.LedgerState.replay(iter(rows))
    assert from_checkpoint.balance() == whole.balance() == ledger.balance() == verify(place) == read(place)
    assert from_checkpoint.checkpoint() == whole.checkpoint()
    successor = Ledger.create(place, roomy)
    assert successor.balance().charged == ledger.balance().charged
    write(successor, 20)
    assert verify(place) == successor.balance()


def test_a_start_reads_nothing_before_its_checkpoint(path: Path, roomy: PrivacyBudget) -> None:
    ledger = Ledger.create(path, roomy)
    write(ledger, 20)
    before = ledger.balance()
    tamper(path, "UPDATE privmix_ledger SET body = replace(body, '5', '4') WHERE seq = 3")
    assert read(path) == before
    with pytest.raises(LedgerCorrupt, match="row 3 was changed"):
        verify(path)


def test_a_forged_checkpoint_is_detected(place: str, ledger: Ledger) -> None:
    ledger.lease(COARSE, 10)
    forged = state.LedgerState.replay(iter(stored(place))).checkpoint().model_copy(update={"charged": (1,)})
    append(place, epoch=1, kind="checkpoint", body=forged.model_dump_json())
    with pytest.raises(LedgerCorrupt, match="does not match the rows before it"):
        verify(place)


def test_checkpoints_keep_open_leases_and_recent_closed_leases(
    ledger: Ledger, place: str, roomy: PrivacyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "REMEMBERED", 3)
    ledger.lease(COARSE, 7, "open")
    ledger.settle(ledger.lease(COARSE, 7, "old").lease, 2)
    write(ledger, 40)
    ledger.settle(ledger.lease(COARSE, 7, "recent").lease, 2)
    successor = Ledger.create(place, roomy)
    successor.settle("open", 1)
    successor.settle("recent", 2)
    with pytest.raises(LeaseRefused, match="holds no lease 'old'"):
        successor.settle("old", 2)
    assert verify(place) == successor.balance()


def test_measured_losses_and_stops_are_in_a_checkpoint(place: str, measured: PrivacyBudget) -> None:
    ledger = Ledger.create(place, measured)
    for number in range(2 * EVERY):
        assert ledger.charge(SUBMIX, [[0.01, 0.02]], str(number)) == 1
    assert ledger.charge(SUBMIX, [[100.0, 0.0]], "last") == 0
    write_nothing = Ledger.create(place, measured)
    assert (write_nothing.balance().losses, write_nothing.balance().stopped) == (ledger.balance().losses, True)
    assert verify(place) == write_nothing.balance()


def test_concurrent_calls_share_a_transaction_and_none_is_lost(
    ledger: Ledger, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits, gate, write = list[int](), threading.Event(), ledger._write

    def counted(calls: Sequence[Any]) -> None:
        gate.wait()
        commits.append(len(calls))
        write(calls)

    monkeypatch.setattr(ledger, "_write", counted)
    with ThreadPoolExecutor(20) as pool:
        leases = [pool.submit(ledger.lease, COARSE, 3, f"lease-{number}") for number in range(19)]
        bad = pool.submit(ledger.settle, "unknown", 0)
        while len(ledger._waiting) < 19:  # the first call runs the transaction of all
            time.sleep(0.01)
        gate.set()
        assert [lease.result().count for lease in leases] == [3] * 19
        with pytest.raises(LeaseRefused):
            bad.result()
    assert commits == [1, 19]
    assert read(place).charged == {COARSE: 57}


def test_callers_in_one_transaction_share_the_last_tokens(place: str, terms: PrivacyBudget) -> None:
    ledger, room = Ledger.create(place, terms), Filter(terms).affordable({}, COARSE)
    with ThreadPoolExecutor(16) as pool:
        granted = list(pool.map(lambda _: ledger.lease(COARSE, 30).count, range(16)))
    assert sum(granted) == room
    assert ledger.lease(COARSE, 1).count == 0


def test_forfeited_tokens_are_charged_even_beyond_the_budget(place: str, terms: PrivacyBudget) -> None:
    ledger, room = Ledger.create(place, terms), Filter(terms).affordable({}, COARSE)
    with pytest.raises(LeaseRefused, match="nothing was ever charged"):
        ledger.forfeit(5)
    ledger.settle(ledger.lease(COARSE, 100).lease, 100)
    assert ledger.forfeit(50) == {COARSE: 50}
    assert ledger.lease(COARSE, 1000).count == room - 150
    ledger.forfeit(1000)
    assert ledger.balance().charged == {COARSE: room + 1000}
    assert Ledger.create(place, terms).lease(COARSE, 1).count == 0
    assert [json.loads(row.body)["count"] for row in stored(place) if row.kind == "forfeit"] == [50, 1000]


def test_forfeiting_tokens_of_unknown_losses_stops_the_ledger(place: str, measured: PrivacyBudget) -> None:
    ledger = Ledger.create(place, measured)
    ledger.charge(SUBMIX, [[0.01, 0.02]], "first")
    ledger.forfeit(1)
    assert ledger.balance().stopped
    assert verify(place) == ledger.balance()
