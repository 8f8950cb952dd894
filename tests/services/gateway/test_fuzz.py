"""Claim: any request body reaches the coordinator or is refused with an error that names its fault, but never a 500."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from privmix.gateway.schema import ChatRequest, CompletionRequest
from privmix.gateway.unsupported import REASONS

MARK = "Wilhelmina"

FIELDS = sorted(
    {"unknown", *REASONS, *(name for body in (CompletionRequest, ChatRequest) for name in body.model_fields)}
)
TEXT = st.sampled_from(["", MARK, "privmix", "text", "user", "\n", "\ud800", "none", "a" * 200])
SCALARS = st.none() | st.booleans() | st.integers(-3, 600) | st.integers() | st.floats() | TEXT | st.text(max_size=5)
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "name", "refusal", "type", "text"]), SCALARS, max_size=4)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["type", "text", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
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


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    text, damage = json.dumps(draw(bodies())).encode(), draw(st.binary(min_size=1, max_size=3))
    start = draw(st.integers(0, len(text)))
    return text[:start] + damage + text[start + len(damage) :]


SENT = st.one_of((bodies() | VALUES).map(lambda body: json.dumps(body).encode()), st.binary(max_size=200), damaged())


@settings(max_examples=600, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["/v1/completions", "/v1/chat/completions"]), SENT)
def test_any_bytes(client: TestClient, route: str, body: bytes) -> None:
    response = client.post(route, content=body, headers={"content-type": "application/json"})
    assert response.status_code in (400, 404, 413, 503)
    error = response.json()["error"]
    assert error["code"] != "internal_error"
    assert error["param"] is not None or response.status_code == 503
    assert MARK not in response.text
