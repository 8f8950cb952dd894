"""Claim: any request body reaches the coordinator or is refused with an error that names its fault, but never a 500."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from tests.support.bodies import FIELDS, MARK, MESSAGE, VALUES

LIKELY = {
    "model": st.just("privmix"),
    "prompt": st.just(MARK) | st.lists(st.integers(0, 49_151), min_size=1, max_size=5),
    "messages": st.lists(MESSAGE, max_size=3),
    "n": st.integers(1, 3),
    "stream": st.booleans(),
}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    body = {name: draw(values) for name, values in LIKELY.items() if draw(st.integers(0, 9))}
    return body | draw(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))


def check(client: TestClient, route: str, body: bytes) -> None:
    response = client.post(route, content=body, headers={"content-type": "application/json"})
    assert response.status_code in (400, 404, 413, 503)
    error = response.json()["error"]
    assert error["code"] != "internal_error"
    assert error["param"] is not None or response.status_code == 503
    assert MARK not in response.text


routes = st.sampled_from(["/v1/completions", "/v1/chat/completions"])
many_examples = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many_examples
@given(routes, bodies())
def test_any_object(client: TestClient, route: str, body: dict[str, Any]) -> None:
    check(client, route, json.dumps(body).encode())


@many_examples
@given(routes, VALUES)
def test_any_json(client: TestClient, route: str, body: Any) -> None:
    check(client, route, json.dumps(body).encode())


@many_examples
@given(routes, st.binary(max_size=200))
def test_any_bytes(client: TestClient, route: str, body: bytes) -> None:
    check(client, route, body)


@many_examples
@given(routes, bodies(), st.binary(min_size=1, max_size=3), st.floats(0, 1))
def test_any_damage(client: TestClient, route: str, body: dict[str, Any], damage: bytes, place: float) -> None:
    text = json.dumps(body).encode()
    start = int(place * len(text))
    check(client, route, text[:start] + damage + text[start + len(damage) :])
