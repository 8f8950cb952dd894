"""Claim: the ledger and the keys open their databases with the same timeouts, encryption and protection of files."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import pytest
from sqlalchemy import Connection, text

from privmix.budget.store.database import LedgerDatabase
from privmix.database.service import ServiceDatabase
from privmix.foundation.errors import KeysUnavailable, LedgerUnavailable
from privmix.keys.store import KeyStore
from tests.postgresql import Server


class Opened(Protocol):
    def transaction(self) -> AbstractContextManager[Connection]: ...


UNAVAILABLE = (LedgerUnavailable, KeysUnavailable)
OPEN: dict[str, Callable[[str], Opened]] = {
    "ledger": lambda place: LedgerDatabase(place, "create"),
    "keys": lambda place: ServiceDatabase(place),
}


@pytest.fixture(params=sorted(OPEN))
def content(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def reopened(content: str, place: str) -> Opened:
    """Opens a database that exists, as a service does after its start."""
    OPEN[content](place)
    return LedgerDatabase(place, "write") if content == "ledger" else ServiceDatabase(place)


@contextmanager
def listening(host: str, answer: bytes | None = None) -> Iterator[int]:
    """Yields the port of a server that accepts connections, and gives each an answer or, by default, never one."""
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server((host, 0)))

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client = opened.enter_context(listener.accept()[0])
                    if answer is not None:
                        client.recv(8)
                        client.sendall(answer)

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]


def test_a_lock_of_another_writer_is_not_awaited_for_ever(
    content: str, postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    database: Opened = OPEN[content](url := postgresql.database())
    monkeypatch.setattr("privmix.database.postgresql.LOCK_TIMEOUT", "50ms")
    other: Opened = OPEN[content](url)
    with database.transaction(), pytest.raises(UNAVAILABLE, match="another writer has locked it"), other.transaction():
        pass
    with other.transaction():
        pass


def test_the_lock_of_a_silent_writer_expires(content: str, postgresql: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privmix.database.postgresql.IDLE_TIMEOUT", "1s")
    database = reopened(content, postgresql.database())
    with pytest.raises(UNAVAILABLE), database.transaction() as connection:
        time.sleep(2.5)
        connection.exec_driver_sql("SELECT 1")


def test_a_server_that_does_not_answer_is_given_up(content: str) -> None:
    with listening("127.0.0.1") as silent, pytest.raises(UNAVAILABLE, match="check that the server runs"):
        OPEN[content](f"postgresql://user@127.0.0.1:{silent}/base?connect_timeout=2").transaction().__enter__()


@pytest.mark.parametrize("operation", ["statement", "commit"])
def test_a_server_process_that_hangs_is_given_up(
    content: str, operation: str, postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stays open and the kernel acknowledges what is sent, so that no TCP timeout ends it."""
    monkeypatch.setattr("privmix.database.limited_connection.SILENCE_S", 2.0)
    database = reopened(content, url := postgresql.database())
    with ExitStack() as hanging, pytest.raises(UNAVAILABLE, match="silent"), database.transaction() as connection:
        hanging.enter_context(postgresql.hanging_sessions(url))
        if operation == "statement":
            connection.exec_driver_sql("SELECT 1")
    with database.transaction() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1


def test_a_statement_that_is_too_slow_ends_at_the_server(
    content: str, postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privmix.database.postgresql.STATEMENT_TIMEOUT", "1s")
    database = reopened(content, postgresql.database())
    with pytest.raises(UNAVAILABLE, match="overloaded; try again"), database.transaction() as connection:
        connection.exec_driver_sql("SELECT pg_sleep(30)")


def test_a_server_on_the_network_must_encrypt(content: str, postgresql: Server) -> None:
    """The host is a socket directory in the first URL, so libpq refuses only the second one, at the TLS handshake."""
    database = OPEN[content](postgresql.database())
    with database.transaction() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
    without_tls = listening("127.0.0.2", b"N")
    with without_tls as port, pytest.raises(UNAVAILABLE, match="set up TLS on the server"):
        OPEN[content](f"postgresql://user@127.0.0.2:{port}/base").transaction().__enter__()


def test_a_removed_file_of_keys_is_noticed_and_not_recreated(tmp_path: Path) -> None:
    place = tmp_path / "keys.db"
    store = KeyStore(ServiceDatabase(place))
    store.create("team")
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(KeysUnavailable, match="put it back"):
        store.required()
    assert not place.exists()


def test_a_replaced_file_of_keys_is_opened_again(tmp_path: Path) -> None:
    place, other = tmp_path / "keys.db", tmp_path / "other.db"
    store = KeyStore(ServiceDatabase(place))
    assert not store.required()
    restored = KeyStore(ServiceDatabase(other))
    restored.create("team")
    restored._database._database._engine.dispose()
    other.replace(place)
    for suffix in ("-wal", "-shm"):
        Path(f"{place}{suffix}").unlink(missing_ok=True)
    assert store.required(), "the queries read the new file, not the removed one"


def test_a_database_without_an_encoding_holds_a_ledger(postgresql: Server) -> None:
    with postgresql.connect() as connection:
        connection.execute("CREATE DATABASE plain ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    for use in OPEN.values():
        with use(postgresql.url("plain")).transaction() as transaction:
            assert transaction.execute(text("SELECT 'Zoë'")).scalar_one() == "Zoë"


def test_no_statement_is_prepared_on_the_server(postgresql: Server) -> None:
    """A pooler in transaction mode gives the next transaction another session."""
    with LedgerDatabase(postgresql.database(), "create").transaction() as transaction:
        for _ in range(10):
            transaction.execute(text("SELECT 1"))
        assert transaction.execute(text("SELECT count(*) FROM pg_prepared_statements")).scalar_one() == 0
