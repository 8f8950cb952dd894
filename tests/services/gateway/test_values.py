"""Claim: numbers and texts of any size and any characters, wherever a request may have them, are refused with 400."""

from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from privmix.gateway.administration import NewKey, ShareBody
from privmix.requests.errors import ApiError
from privmix.requests.values import MAX_COUNT

DIGITS = "9" * 5000


def check(client: TestClient, method: str, path: str, param: str, **request: object) -> None:
    response = client.request(method, path, **request)  # type: ignore[arg-type]
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert len(response.text) < 500


@pytest.mark.parametrize("number", [DIGITS, "-1", "1e3"])
def test_a_number_in_a_header(client: TestClient, number: str) -> None:
    headers = {"content-length": number, "content-type": "application/json"}
    check(client, "POST", "/v1/completions", "content-length", content=b"{}", headers=headers)


@pytest.mark.parametrize("text", ["a\0b", "\x1b[2J", "a\tb", "\x7f", "a" * 513])
@pytest.mark.parametrize(
    ("method", "path", "param"),
    [
        ("GET", "/v1/models/{}", "name"),
        ("DELETE", "/v1/keys/{}", "key"),
        ("PUT", "/v1/groups/{}/share", "group"),
        ("GET", "/v1/privacy?model={}", "query"),
    ],
)
def test_a_text_in_an_address(client: TestClient, method: str, path: str, param: str, text: str) -> None:
    check(client, method, path.format(quote(text, safe="")), param)


@pytest.mark.parametrize("number", [MAX_COUNT + 1, 10**4000, -1])
def test_a_limit_in_a_body(number: int) -> None:
    for field in ShareBody.model_fields:
        with pytest.raises(ApiError) as refused:
            ShareBody.parse(f'{{"{field}": {number}}}'.encode())
        assert (refused.value.status, refused.value.param) == (400, field)
        assert ShareBody.parse(f'{{"{field}": {MAX_COUNT}}}'.encode())


def test_a_name_in_a_body() -> None:
    for field in ("name", "owner", "group"):
        with pytest.raises(ApiError) as refused:
            NewKey.parse(rb'{"name": "ward", "%s": "a\u0000b"}' % field.encode())
        assert (refused.value.status, refused.value.param) == (400, field)
