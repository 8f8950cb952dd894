"""Claim: a ledger in PostgreSQL survives kills of the server and lost connections, and refuses unsafe settings."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psycopg
import pytest

from privmix.budget.anchor import DirectoryAnchor
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.budget.store.database import LedgerDatabase
from privmix.foundation.errors import LedgerError, LedgerUnavailable
from tests.postgresql import PATIENCE, Server, running
from tests.services.budget import writers
from tests.services.budget.events import COARSE
from tests.services.budget.grant_log import GrantLog
from tests.services.budget.processes import spawn
from tests.support.waiting import until
from tests.wire import Wire


@pytest.fixture(scope="module")
def frail() -> Iterator[Server]:
    """A server of its own to stop, kill and configure, because recovery takes longer with many databases."""
    with running() as server:
        yield server


@pytest.fixture
def url(postgresql: Server) -> str:
    return postgresql.database()


@pytest.fixture
def ledger(url: str, terms: PrivacyBudget) -> Ledger:
    return Ledger.create(url, terms)


@pytest.fixture
def wire(postgresql: Server) -> Iterator[tuple[Wire, str]]:
    """A proxy that can lose a connection, and its folder, which a URL names as the host."""
    with tempfile.TemporaryDirectory() as folder:
        wire = Wire(Path(folder), postgresql.folder)
        yield wire, folder
        wire.close()


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_a_url_needs_no_driver(url: str, terms: PrivacyBudget, scheme: str) -> None:
    Ledger.create(url.replace("postgresql", scheme, 1), terms).lease(COARSE, 10)
    assert read(url).charged == {COARSE: 10}


@pytest.mark.parametrize(("lost", "charged"), [("request", 0), ("answer", 5)])
def test_a_connection_lost_in_a_commit_grants_nothing_and_loses_nothing(
    wire: tuple[Wire, str],
    postgresql: Server,
    url: str,
    terms: PrivacyBudget,
    tmp_path: Path,
    lost: Literal["request", "answer"],
    charged: int,
) -> None:
    (line, host), anchor = wire, DirectoryAnchor(tmp_path)
    ledger = Ledger.create(url.replace(str(postgresql.folder), host), terms, anchors=(anchor,))
    line.lose = lost
    with pytest.raises(LedgerUnavailable):
        ledger.lease(COARSE, 5, "mine")
    assert read(url).charged[COARSE] == charged if charged else not read(url).charged
    ledger.check()
    assert ledger.lease(COARSE, 5, "mine").count == 5, "a repeated request reconnects and charges once"
    assert (end := anchor.read(ledger.balance().id)) is not None
    assert end.tokens == {COARSE: 5}, "else an older copy of the ledger would be accepted, without this grant"
    assert ledger.lease(COARSE, 7).count == 7
    assert read(url).charged == {COARSE: 12}
    assert read(url) == ledger.balance()


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_a_server_killed_at_any_moment_keeps_every_grant(frail: Server, roomy: PrivacyBudget, kills: int) -> None:
    url, log = frail.database(), GrantLog()
    process, connection = spawn(writers.lease_forever, url, roomy, 0)
    log.record(connection.recv())
    for kill in range(1, kills + 1):
        granted = len(log.granted)
        while len(log.granted) < granted + 10:
            log.record(connection.recv())
        frail.kill()
        while log.interruptions < kill:
            log.record(connection.recv())
        frail.start()
        log.record_pending(connection)
    while len(log.granted) < granted + 20:
        log.record(connection.recv())
    process.kill()
    process.join()
    log.record_all(connection)
    log.check(read(url))
    assert read(url).epoch == 1, "the same writer continued"


def test_a_commit_whose_standby_is_lost_keeps_no_lock_and_is_granted_once_a_standby_has_it(
    frail: Server, terms: PrivacyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privmix.database.limited_connection.SILENCE_S", 1.0)
    monkeypatch.setattr("privmix.database.postgresql.LOCK_TIMEOUT", "100ms")
    url = frail.database()
    ledger = Ledger.create(url, terms)
    with frail.connect(url) as connection, frail.awaiting_a_standby():
        with pytest.raises(LedgerUnavailable, match="synchronous standby"):
            ledger.lease(COARSE, 5, "mine")
        locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        kept = "the server keeps the lock of a commit that its client gave up"
        until(lambda: connection.execute(locks).fetchone() == (0,), PATIENCE, lambda: kept)
        assert read(url).charged == {COARSE: 5}, "it is on this server's disk"
        with pytest.raises(LedgerUnavailable, match="synchronous standby"):
            ledger.lease(COARSE, 5, "mine")
    assert ledger.lease(COARSE, 5, "mine").count == 5
    assert read(url).charged == {COARSE: 5}


def test_commits_are_synchronous_in_spite_of_the_databases_settings(
    postgresql: Server, url: str, ledger: Ledger
) -> None:
    with postgresql.connect(url) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET synchronous_commit = off")
    with LedgerDatabase(url, "write").transaction() as ours:
        assert ours.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"


def test_a_server_without_fsync_is_refused(frail: Server, terms: PrivacyBudget) -> None:
    url = frail.database()
    with frail.connect() as connection:
        configure(connection, "ALTER SYSTEM SET fsync = off", "off")
        try:
            with pytest.raises(LedgerUnavailable, match="fsync = off and may lose"):
                Ledger.create(url, terms)
        finally:
            configure(connection, "ALTER SYSTEM RESET fsync", "on")
    assert Ledger.create(url, terms).lease(COARSE, 1).count == 1


def configure(connection: psycopg.Connection, statement: str, fsync: str) -> None:
    """Changes the setting and waits until the server applies it."""
    connection.execute(statement)
    connection.execute("SELECT pg_reload_conf()")
    while connection.execute("SHOW fsync").fetchone() != (fsync,):
        time.sleep(0.02)


def test_the_error_on_a_standby_names_the_fix(
    ledger: Ledger, postgresql: Server, url: str, terms: PrivacyBudget
) -> None:
    with postgresql.connect(url) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET default_transaction_read_only = on")
    with pytest.raises(LedgerUnavailable, match="use the URL of the primary"):
        Ledger.create(url, terms)
    assert read(url) == ledger.balance()


def test_a_read_only_user_reads_and_gets_a_clear_error_on_writes(
    ledger: Ledger, postgresql: Server, url: str, terms: PrivacyBudget
) -> None:
    with postgresql.connect(url) as connection:
        connection.execute("CREATE ROLE auditor LOGIN")
        connection.execute("GRANT SELECT ON privmix_ledger, privmix_ledger_schema TO auditor")
    auditors = url.replace("postgres@", "auditor@")
    assert read(auditors) == ledger.balance()
    with pytest.raises(LedgerUnavailable, match="grant this user SELECT and INSERT"):
        Ledger.create(auditors, terms)


def test_passwords_are_not_shown(terms: PrivacyBudget) -> None:
    for wrong in ("postgresql://user:hunter2@127.0.0.1:1/ledger", "postgresql://user:hunter2@host:port/ledger"):
        with pytest.raises(LedgerError) as caught:
            Ledger.create(wrong, terms)
        assert "hunter2" not in str(caught.value)
        assert "user" in str(caught.value) or "***" in str(caught.value)
