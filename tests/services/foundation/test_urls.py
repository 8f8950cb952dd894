"""Claim: no proxy of the environment stands before this machine, and one before another machine is named."""

import httpx
import pytest

from privmix.foundation.errors import InputError
from privmix.foundation.urls import http_url, proxy_before
from privmix.generation.client import ServiceClient

DEAD = "127.0.0.1:9"


def test_an_ipv6_address_is_in_brackets() -> None:
    assert httpx.URL(http_url("::1", 8000)).host == "::1"
    assert http_url("127.0.0.1", 8000) == "http://127.0.0.1:8000"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "[::1]"])
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY", "all_proxy"])
def test_this_machine_is_asked_directly(host: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, f"http://{DEAD}")
    assert proxy_before(f"http://{host}:8000") is None


@pytest.mark.anyio
async def test_a_dead_proxy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", f"http://user:secret@{DEAD}")
    with pytest.raises(
        InputError, match=r"no service answers at http://clinic\.example through the proxy of HTTP_PROXY:"
    ):
        async with ServiceClient("http://clinic.example", None):
            pass
    monkeypatch.setenv("NO_PROXY", "clinic.example")
    assert proxy_before("http://clinic.example") is None


def test_a_proxy_that_needs_a_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", f"socks5://{DEAD}")
    with pytest.raises(InputError, match="url: ALL_PROXY names a proxy"):
        ServiceClient("https://clinic.example", None)
