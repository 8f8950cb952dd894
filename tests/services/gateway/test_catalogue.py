"""What the service says of itself: models, version, tokens, its own description, and to which web pages it talks."""

import asyncio
from collections.abc import AsyncGenerator
from importlib.metadata import version
from typing import Any

import pytest
from starlette.testclient import TestClient

from services.gateway.errors import ApiError, unavailable
from services.gateway.schema import ChatRequest, CompletionRequest
from services.gateway.sse import HEARTBEAT, kept_alive
from tests.services.gateway.conftest import MakeClient

CHAT = [{"role": "user", "content": "Good morning"}]


def test_models_say_how_long_a_text_may_be(client: TestClient) -> None:
    assert [model["max_model_len"] for model in client.get("/v1/models").json()["data"]] == [512, 512]


def test_the_version(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": version("privmix")}


def test_text_to_tokens_and_back(client: TestClient) -> None:
    asked = {"model": "privmix", "prompt": "Good morning", "return_token_strs": True}
    told = client.post("/tokenize", json=asked).json()
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 512)
    assert told["token_strs"] == ["Good", "\u0120morning"]
    assert client.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "Good morning"}
    assert client.post("/tokenize", json={"messages": CHAT}).json()["count"] > told["count"]


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/tokenize", {}, "body"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "body"),
        ("/tokenize", {"prompt": 4}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 513}, "tokens"),
    ],
)
def test_tokens_that_cannot_be_had(client: TestClient, route: str, body: dict[str, Any], param: str) -> None:
    response = client.post(route, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_the_description_is_that_of_the_models_that_validate(client: TestClient) -> None:
    described = client.get("/openapi.json").json()
    schemas = described["components"]["schemas"]
    for route, model in (("/v1/completions", CompletionRequest), ("/v1/chat/completions", ChatRequest)):
        body = described["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = schemas[body["$ref"].rsplit("/", 1)[-1]]
        assert set(schema["properties"]) == set(model.model_fields)
    assert schemas["ChatRequest"]["properties"]["repetition_penalty"]["enum"] == [None, 1.0]
    assert schemas["Completion"]["properties"]["privmix"]


def test_the_documentation_loads_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text


def test_web_pages_of_other_origins_may_call_where_the_operator_says_so(make_client: MakeClient) -> None:
    asking = {"origin": "https://front.example", "access-control-request-method": "POST"}
    allowed = make_client(cors_origins=("https://front.example",), api_keys=("one",))
    preflight = allowed.options("/v1/chat/completions", headers=asking)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "https://front.example")
    refused = allowed.get("/v1/models", headers={"origin": "https://front.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://front.example")
    other = allowed.options("/v1/chat/completions", headers=asking | {"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in make_client().options("/v1/models", headers=asking).headers


async def slow(*steps: bytes | float | ApiError) -> AsyncGenerator[bytes, None]:
    for step in steps:
        if isinstance(step, bytes):
            yield step
        elif isinstance(step, float):
            await asyncio.sleep(step)
        else:
            raise step


@pytest.mark.anyio
async def test_a_stream_that_waits_sends_comments() -> None:
    written = [chunk async for chunk in kept_alive(slow(0.25, b"one", b"two", 0.25, b"three"), 0.1)]
    assert [chunk for chunk in written if chunk != HEARTBEAT] == [b"one", b"two", b"three"]
    assert written[0] == written[written.index(b"two") + 1] == HEARTBEAT


@pytest.mark.anyio
async def test_a_refusal_after_a_comment_is_an_event() -> None:
    *comments, last = [chunk async for chunk in kept_alive(slow(0.25, unavailable("no")), 0.1)]
    assert set(comments) == {HEARTBEAT}
    assert b'"service_unavailable"' in last
    with pytest.raises(ApiError):
        await anext(kept_alive(slow(unavailable("no")), 0.1))


@pytest.mark.anyio
async def test_a_stream_that_is_left_is_closed() -> None:
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
