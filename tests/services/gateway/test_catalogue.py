"""Claim: the gateway describes its models, version and API, tokenizes text, and keeps waiting streams alive."""

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.testclient import TestClient

from privmix.gateway.errors import ApiError, unavailable
from privmix.gateway.schema import ChatRequest, CompletionRequest
from privmix.gateway.settings import ClientSettings
from privmix.gateway.streaming import HEARTBEAT, kept_alive
from tests.support.app import MakeClient

CHAT = [{"role": "user", "content": "Good morning"}]


def test_a_model_is_described_under_each_of_its_names(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [(model["id"], model["max_model_len"]) for model in listed["data"]] == [("privmix", 512), ("clinic", 512)]
    assert client.get("/v1/models/clinic").json() == listed["data"][1]
    refused = client.get("/v1/models/hospital")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/v1/models", "/v1/models/privmix", "/version"])
def test_head_answers_as_get(client: TestClient, path: str) -> None:
    assert client.head(path).status_code == client.get(path).status_code != 405


def test_the_default_batch_of_a_client_is_no_error(make_client: MakeClient) -> None:
    client = make_client(max_prompts=ClientSettings.model_fields["max_prompts"].default)
    answer = client.post("/v1/completions", json={"model": "privmix", "prompt": ["a"] * 20, "max_tokens": 1})
    assert answer.status_code == 503, "all checks are passed, and there are no actors"


def test_a_prompt_and_a_chat_are_tokenized(client: TestClient) -> None:
    body = {"model": "privmix", "prompt": "Good morning"}
    tokenized = client.post("/tokenize", json=body).json()
    assert (tokenized["count"], tokenized["max_model_len"]) == (len(tokenized["tokens"]), 512)
    assert client.post("/tokenize", json={"messages": CHAT}).json()["count"] > tokenized["count"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "body"),
        ({"prompt": "a", "messages": CHAT}, "body"),
        ({"prompt": 4}, "prompt"),
        ({"prompt": "a", "model": "gpt"}, "model"),
    ],
)
def test_an_invalid_tokenization_request_is_refused(client: TestClient, body: dict[str, Any], param: str) -> None:
    response = client.post("/tokenize", json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_the_openapi_description_matches_the_validating_models(client: TestClient) -> None:
    description = client.get("/openapi.json").json()
    schemas = description["components"]["schemas"]
    for route, model in (("/v1/completions", CompletionRequest), ("/v1/chat/completions", ChatRequest)):
        body = description["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = schemas[body["$ref"].rsplit("/", 1)[-1]]
        assert set(schema["properties"]) == set(model.model_fields)


@pytest.mark.parametrize("path", ["/docs", "/console"])
def test_a_page_loads_nothing_from_other_hosts(client: TestClient, path: str) -> None:
    page = client.get(path)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg\b)", page.text)


def test_web_pages_of_allowed_origins_may_call_the_service(make_client: MakeClient) -> None:
    headers = {"origin": "https://front.example", "access-control-request-method": "POST"}
    allowed = make_client(cors_origins=("https://front.example",), api_keys=("one",))
    preflight = allowed.options("/v1/chat/completions", headers=headers)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "https://front.example")
    refused = allowed.get("/v1/models", headers={"origin": "https://front.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://front.example")
    other = allowed.options("/v1/chat/completions", headers=headers | {"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in make_client().options("/v1/models", headers=headers).headers


async def slow(*steps: bytes | float | ApiError) -> AsyncGenerator[bytes, None]:
    for step in steps:
        if isinstance(step, bytes):
            yield step
        elif isinstance(step, float):
            await asyncio.sleep(step)
        else:
            raise step


@pytest.mark.anyio
async def test_a_waiting_stream_sends_comments() -> None:
    chunks = [chunk async for chunk in kept_alive(slow(0.25, b"one", b"two", 0.25, b"three"), 0.1)]
    assert [chunk for chunk in chunks if chunk != HEARTBEAT] == [b"one", b"two", b"three"]
    assert chunks[0] == chunks[chunks.index(b"two") + 1] == HEARTBEAT


@pytest.mark.anyio
async def test_a_refusal_after_a_comment_is_an_event() -> None:
    *comments, last = [chunk async for chunk in kept_alive(slow(0.25, unavailable("no")), 0.1)]
    assert set(comments) == {HEARTBEAT}
    assert b'"service_unavailable"' in last
    with pytest.raises(ApiError):
        await anext(kept_alive(slow(unavailable("no")), 0.1))


@pytest.mark.anyio
async def test_an_abandoned_stream_is_closed() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.sleep(3600)
            yield b""
        finally:
            closed.set()

    stream = kept_alive(endless(), 0.01)
    assert await anext(stream) == HEARTBEAT
    await stream.aclose()
    assert closed.is_set()


def test_a_gateway_without_other_actors_is_alive_and_says_what_is_missing(client: TestClient) -> None:
    assert client.get("/livez").status_code == 200, "a restart of its process would not help"
    refused = client.get("/readyz")
    assert (refused.status_code, refused.json()) == (503, {"status": "unavailable"})
    assert int(refused.headers["retry-after"]) > 0
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "unavailable")
    assert health.json()["missing"] == list(health.json()["troubles"]) == ["coordinator", "budget"]
    statement = client.get("/v1/privacy")
    assert (statement.status_code, statement.json()["error"]["code"]) == (503, "service_unavailable")
    assert "'budget'" in statement.json()["error"]["message"]
