"""Claim: with a port of its own for administration, the public port administers nothing."""

import socket
from typing import Any

import httpx
import pytest

from privmix.gateway import app
from privmix.requests.keys import KeyService
from tests.support.app import MakeClient

KEY = {"authorization": "Bearer one"}
ROUTES = [("GET", "/v1/keys"), ("DELETE", "/v1/keys/team"), ("PUT", "/v1/groups/wards/share")]


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_only_the_port_of_administration_has_its_routes(make_client: MakeClient, port: int) -> None:
    public = make_client(api_keys=("one",), administration_port=port)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=KEY, timeout=60) as private:
        for method, path in ROUTES:
            assert public.request(method, path, headers=KEY).status_code == 404
            assert private.request(method, path).status_code == 403, "the key lacks the scope"
        assert "/v1/keys" not in public.get("/openapi.json").json()["paths"]
        assert "/v1/keys" in private.get("/openapi.json").json()["paths"]
        assert public.get("/v1/models", headers=KEY).json() == private.get("/v1/models").json()
        assert private.get("/v1/models", headers={"authorization": ""}).status_code == 401


def test_both_ports_are_one_gateway(make_client: MakeClient, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys actor ends the requests of a gateway without heartbeats."""
    made: list[KeyService] = []

    class Recorded(KeyService):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made.append(self)

    monkeypatch.setattr(app, "KeyService", Recorded)
    make_client(api_keys=("one",), administration_port=port)
    assert len(made) == 1


def test_gateways_of_one_node_share_the_port_and_close_it(make_client: MakeClient, port: int) -> None:
    from tests.support.app import app_client

    with app_client(administration_port=port), app_client(administration_port=port):
        assert httpx.get(f"http://127.0.0.1:{port}/livez", timeout=60).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/livez", timeout=60)


def test_without_it_one_port_has_all_routes(make_client: MakeClient) -> None:
    client = make_client(api_keys=("one",))
    for method, path in ROUTES:
        assert client.request(method, path, headers=KEY).status_code == 403
