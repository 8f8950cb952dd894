"""Claim: a ledger keeps every grant when processes are killed, fenced, out of disk space, or read concurrently."""

import random
import time
from pathlib import Path

import pytest

from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.foundation.errors import LedgerUnavailable
from tests.services.budget import writers
from tests.services.budget.events import COARSE
from tests.services.budget.grant_log import GrantLog
from tests.services.budget.processes import answer, spawn


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_process_killed_at_any_moment_keeps_every_reported_grant(
    place: str, roomy: PrivacyBudget, kills: int
) -> None:
    log = GrantLog()
    for seed in range(kills):
        process, connection = spawn(writers.lease_forever, place, roomy, seed)
        log.record(connection.recv())
        time.sleep(random.Random(seed).uniform(0.0, 0.08))
        while seed == kills - 1 and not log.settled:  # on a busy machine, all others may die before
            log.record(connection.recv())
        process.kill()
        process.join()
        log.record_all(connection)
        log.check(read(place))
    assert log.epoch == kills


def test_processes_that_open_concurrently_have_different_epochs(place: str, terms: PrivacyBudget) -> None:
    started = [spawn(writers.open_once, place, terms) for _ in range(4)]
    assert sorted(connection.recv() for _, connection in started) == [1, 2, 3, 4]
    for process, _ in started:
        process.join()
    assert read(place).epoch == 4


def test_a_reader_sees_a_consistent_ledger_during_writes(place: str, roomy: PrivacyBudget) -> None:
    process, connection = spawn(writers.lease_forever, place, roomy, 0)
    connection.recv()
    balances = [read(place) for _ in range(50)]
    process.kill()
    process.join()
    lengths = [balance.rows for balance in balances]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    assert {balance.epoch for balance in balances} == {1}


def test_a_full_disk_grants_nothing(path: Path, terms: PrivacyBudget) -> None:
    refused, granted_later = answer(writers.meet_a_full_disk, path, terms)
    assert isinstance(refused, LedgerUnavailable)
    assert str(path) in str(refused)
    assert granted_later == 7
    assert read(path).charged in ({COARSE: 7}, {COARSE: 12})


def test_a_read_only_place_grants_nothing_and_can_be_read(public_directory: Path, terms: PrivacyBudget) -> None:
    path = public_directory / "ledger.db"
    Ledger.create(path, terms).lease(COARSE, 5)
    opened, balance = answer(writers.meet_a_read_only_place, path, terms)
    assert isinstance(opened, LedgerUnavailable)
    assert "this user must be able to write the file and its directory" in str(opened)
    assert balance.charged == {COARSE: 5}
    assert [file.name for file in public_directory.iterdir()] == [path.name]
