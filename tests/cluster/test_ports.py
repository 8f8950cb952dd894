"""Claim: a service that starts claims its port against other services, not against what it opens itself."""

import socket
from contextlib import closing

import pytest

from privmix.foundation.errors import ConfigurationError
from privmix_cluster.ports import claimed
from tests.running import free_port

HOST = "127.0.0.1"


@pytest.fixture
def port() -> int:
    return free_port()


def listening(port: int) -> socket.socket:
    """Listens as the proxies of Ray Serve do."""
    return socket.create_server((HOST, port), reuse_port=True)


def refused(host: str, port: int) -> bool:
    try:
        with claimed(("http.port", host, port)):
            return False
    except ConfigurationError as error:
        return str(error).startswith(f"http.port: cannot listen on {host}:{port} ")


@pytest.mark.parametrize("host", [HOST, "0.0.0.0", "localhost"])
def test_a_service_that_listens_refuses_a_second_one(port: int, host: str) -> None:
    with listening(port):
        assert refused(host, port)
    assert not refused(host, port)


def test_of_two_starts_one_goes_on_and_listens(port: int) -> None:
    with claimed(("http.port", HOST, port)):
        assert refused(HOST, port)
        with listening(port):
            assert refused(HOST, port)
    assert not refused(HOST, port)


@pytest.mark.parametrize("reuse_port", [False, True])
def test_ended_connections_do_not_hold_a_port(port: int, reuse_port: bool) -> None:
    with (
        socket.create_server((HOST, port), reuse_port=reuse_port) as server,
        closing(socket.create_connection((HOST, port))) as client,
    ):
        server.accept()[0].close()  # the side that closes first waits
        assert client.recv(1) == b""
    assert not refused(HOST, port)


def test_an_address_of_another_machine_is_refused(port: int) -> None:
    assert refused("203.0.113.7", port)
