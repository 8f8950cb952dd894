"""Claim: any schema is refused by name or reaches the coordinator, in bounded time, and no error repeats any of it."""

import json
import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from tests.services.structure.random_schemas import random_schema

MARK = "Wilhelmina"
NAMES = st.sampled_from(["a", "b", MARK, "", "$ref", "\n", "é"])
REFERENCES = st.sampled_from(
    ["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#a", "https://x/y", MARK, "#/$defs/%zz"]
)
PATTERNS = st.sampled_from(
    ["a+", "[", "(a|b){1,50}", "(?=a)b", r"\d{3}-\d{4}", MARK, "(.*a){9}", r"\p{Han}", "^$", "a{9999}"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
KEYWORDS = st.sampled_from(
    "type properties required additionalProperties patternProperties items prefixItems minItems maxItems uniqueItems "
    "enum const pattern format minLength maxLength minimum exclusiveMaximum multipleOf anyOf oneOf allOf not $ref "
    f"$defs x-guidance {MARK}".split()
)
EDGES = [sign * (2**bits + step) for bits in (16, 31, 32, 53, 63, 64) for step in (-1, 0, 1) for sign in (1, -1)]
TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null", MARK])
SCHEMAS = st.integers().map(lambda seed: random_schema(random.Random(seed))) | st.recursive(
    JSON | REFERENCES | PATTERNS | TYPES | st.integers(-1, 5000) | st.sampled_from(EDGES),
    lambda inner: st.dictionaries(KEYWORDS, inner, max_size=5) | st.lists(inner, max_size=3),
    max_leaves=12,
)
TEXTS = st.text(max_size=20) | PATTERNS
WISHES = st.one_of(
    SCHEMAS.map(lambda schema: {"structured_outputs": {"json": schema}}),
    SCHEMAS.map(
        lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    ),
    TEXTS.map(lambda text: {"structured_outputs": {"regex": text}}),
    st.lists(TEXTS, max_size=3).map(lambda texts: {"structured_outputs": {"choice": texts}}),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(WISHES)
def test_any_structure(client: TestClient, wish: dict[str, Any]) -> None:
    body = {"model": "privmix", "messages": [{"role": "user", "content": "Hi"}], **wish}
    response = client.post(
        "/v1/chat/completions", content=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    assert response.status_code in (400, 503), response.text
    error = response.json()["error"]
    if response.status_code == 503:  # it reached the coordinator, which this service lacks
        assert error["code"] == "service_unavailable"
    else:
        assert error["param"].startswith(("structured_outputs", "response_format", "body"))
    assert MARK not in response.text
