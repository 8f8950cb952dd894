"""Claim: a service without keys does not answer to web pages, however they reach it; programs and its own pages can."""

import pytest
from starlette.testclient import TestClient

from tests.support.app import MakeClient

BODY = b'{"model": "privmix", "prompt": "Hello"}'
JSON = {"content-type": "application/json"}


def code(client: TestClient, headers: dict[str, str], path: str = "/v1/completions") -> str:
    response = client.post(path, content=BODY, headers=headers)
    error = response.json()["error"]
    assert response.status_code == {"service_unavailable": 503, "unsupported_media_type": 415}.get(error["code"], 403)
    return str(error["code"])


@pytest.mark.parametrize(
    "type_", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data; boundary=a"]
)
def test_a_body_that_a_page_can_send_unasked_is_refused(client: TestClient, type_: str) -> None:
    assert code(client, {"content-type": type_}) == "unsupported_media_type"


@pytest.mark.parametrize("type_", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_read(client: TestClient, type_: str) -> None:
    assert code(client, {"content-type": type_}) == "service_unavailable"


FOREIGN = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[::1", "a:1:2", "")


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_name_that_may_have_been_rebound_is_refused(client: TestClient, host: str, path: str) -> None:
    assert code(client, JSON | {"host": host}, path) == "host_not_allowed"
    assert client.get("/v1/models", headers={"host": host}).status_code == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "a.localhost", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7"]
)
def test_this_machine_is_called_by_its_own_names(client: TestClient, host: str) -> None:
    assert code(client, JSON | {"host": host}) == "service_unavailable"


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000", "http://localhost"])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_page_of_another_origin_is_refused(client: TestClient, origin: str, path: str) -> None:
    assert code(client, JSON | {"origin": origin}, path) == "origin_not_allowed"


def test_its_own_pages_are_served(client: TestClient) -> None:
    assert code(client, JSON | {"origin": "http://localhost:8000"}) == "service_unavailable"


def test_the_operator_allows_names_and_pages(make_client: MakeClient) -> None:
    allowed = make_client(allowed_hosts=("mix.example",), cors_origins=("https://front.example",))
    assert code(allowed, JSON | {"host": "Mix.example:8000"}) == "service_unavailable"
    assert code(allowed, JSON | {"host": "other.example"}) == "host_not_allowed"
    assert code(allowed, JSON | {"origin": "https://front.example"}) == "service_unavailable"
    assert code(allowed, JSON | {"origin": "https://other.example"}) == "origin_not_allowed"


def test_a_key_shows_who_asks(make_client: MakeClient) -> None:
    guarded = make_client(api_keys=("one",))
    headers = JSON | {"authorization": "Bearer one", "host": "mix.example", "origin": "https://front.example"}
    assert code(guarded, headers) == "service_unavailable"
