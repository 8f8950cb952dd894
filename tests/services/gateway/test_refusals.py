"""Claim: an invalid request is refused by an error that names its field, in OpenAI's format, and repeats no input."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from tests.support.app import MakeClient

SECRET = "the patient is called Wilhelmina"
COMPLETION: dict[str, Any] = {"model": "privmix", "prompt": SECRET}
CHAT: dict[str, Any] = {"model": "privmix", "messages": [{"role": "user", "content": SECRET}]}

JSON = {"content-type": "application/json"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

# Refused by both routes: the changed fields, the parameter that the error names, and its code.
SHARED: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "missing_required_parameter"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 5}, "n", "invalid_value"),
    ({"n": True}, "n", "invalid_type"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": 257}, "max_tokens", "invalid_value"),
    ({"temperature": 0}, "temperature", "unsupported_value"),
    ({"top_p": 0}, "top_p", "unsupported_value"),
    ({"top_k": 1}, "top_k", "unsupported_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
    ({"response_format": {"type": SECRET}}, "response_format.type", "invalid_value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": SECRET}}}},
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": f"{SECRET}["}}, "structured_outputs.regex", "invalid_value"),
    ({"structured_outputs": {"grammar": SECRET}}, "structured_outputs.grammar", "unknown_parameter"),
    ({"structured_outputs": {"json": SECRET}}, "structured_outputs.json", "invalid_value"),
    ({"structured_outputs": {"json": {"$ref": SECRET}}}, "structured_outputs.json", "invalid_value"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs.regex",
        "invalid_value",
    ),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", 1]}, "stop", "invalid_type"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value"),
    ({"stop": "x" * 129}, "stop", "invalid_value"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    ({"stream": True, "stream_options": {"pad": 1}}, "stream_options.pad", "unknown_parameter"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_parameter",
    ),
    ({"frequency_penalty": False}, "frequency_penalty", "unsupported_parameter"),
    ({"logit_bias": {"50256": -100}}, "logit_bias", "unsupported_parameter"),
    ({"logprobs": True}, "logprobs", "unsupported_parameter"),
    ({"seed": 42}, "seed", "unsupported_parameter"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "unsupported_parameter"),
    ({"guided_json": {"type": "integer"}}, "guided_json", "unsupported_parameter"),
    ({"colour": "red"}, "colour", "unknown_parameter"),
    ({"colour": 0}, "colour", "unknown_parameter"),
    ({f"{SECRET} as a key": 1}, "body", "unknown_parameter"),
]

OF_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing_required_parameter"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": ["a", ""]}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_type"),
    ({"prompt": [[]]}, "prompt", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": [49_152]}, "prompt", "invalid_value"),
    ({"prompt": [[1], [2**70]]}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 5}, "prompt", "invalid_value"),
    ({"prompt": "word " * 600}, "prompt", "context_length_exceeded"),
    ({"prompt": [[1], [1] * 500], "max_tokens": 13}, "max_tokens", "context_length_exceeded"),
    ({"echo": True, "logprobs": 1}, "logprobs", "unsupported_parameter"),
    ({"logprobs": 0}, "logprobs", "unsupported_parameter"),
    ({"best_of": 3}, "best_of", "unsupported_parameter"),
    ({"suffix": "the end"}, "suffix", "unsupported_parameter"),
    ({"messages": CHAT["messages"]}, "messages", "unknown_parameter"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown_parameter"),
]


def say(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": SECRET, **message}]}


OF_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "invalid_value"),
    (say(role=None), "messages[0].role", "missing_required_parameter"),
    (say(role="tool"), "messages[0].role", "invalid_value"),
    (say(tool_call_id="a"), "messages[0].tool_call_id", "unsupported_parameter"),
    (say(content=None), "messages[0].content", "missing_required_parameter"),
    (say(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content", "unsupported_value"),
    (say(name="Wilhelmina"), "messages[0].name", "unsupported_parameter"),
    (say(tool_calls=[{"id": "a"}]), "messages[0].tool_calls", "unsupported_parameter"),
    (say(mood="bright"), "messages[0].mood", "unknown_parameter"),
    (
        {"messages": [*CHAT["messages"], {"role": "user", "content": "word " * 600}]},
        "messages",
        "context_length_exceeded",
    ),
    ({"max_completion_tokens": 257}, "max_completion_tokens", "invalid_value"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "invalid_value"),
    ({"top_logprobs": 5}, "top_logprobs", "unsupported_parameter"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
    (
        say(content=[{"type": "text", "text": "a", "cache_control": {"type": "b"}}]),
        "messages[0].content",
        "unsupported_value",
    ),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    ({"prompt": "a"}, "prompt", "unknown_parameter"),
]

REFUSED = [
    *[(COMPLETIONS, COMPLETION | fields, param, code) for fields, param, code in SHARED + OF_COMPLETIONS],
    *[(CHATS, CHAT | fields, param, code) for fields, param, code in SHARED + OF_CHATS],
]


def check(body: Any, param: str | None, code: str) -> None:
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"].startswith(f"{param}: ") or param in (None, "body")
    assert "Wilhelmina" not in json.dumps(error)


@pytest.mark.parametrize(("route", "body", "param", "code"), REFUSED)
def test_an_invalid_request_is_refused_by_the_name_of_its_field(
    client: TestClient, route: str, body: dict[str, Any], param: str, code: str
) -> None:
    response = client.post(route, json=body)
    assert response.status_code == 400
    check(response.json(), param, code)
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("route", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("model", ["gpt-4o", "", "part-000", "PRIVMIX", SECRET])
def test_an_unknown_model_is_refused(client: TestClient, route: str, model: str) -> None:
    response = client.post(route, json=(CHAT if route == CHATS else COMPLETION) | {"model": model})
    assert response.status_code == 404
    check(response.json(), "model", "model_not_found")
    assert "privmix, clinic" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"prompt": "Wilhelmina', "invalid_json"),
        (b'{"prompt": Wilhelmina}', "invalid_json"),
        (b"\xff\xfe{}", "invalid_json"),
        (b'{"model": "privmix", "prompt": "\xc3\x28"}', "invalid_json"),
        (b'{"model": "privmix", "prompt": "\\ud800"}', "invalid_json"),
        (b"[" * 50_000, "invalid_json"),
        (b'{"n": ' + b"9" * 10_000 + b"}", "invalid_json"),
        (b"null", "invalid_type"),
        (b"[]", "invalid_type"),
        (b'"Wilhelmina"', "invalid_type"),
        (b"NaN", "invalid_type"),
    ],
)
def test_a_body_that_is_no_json_object_in_utf8_is_refused(client: TestClient, body: bytes, code: str) -> None:
    for route in (COMPLETIONS, CHATS):
        response = client.post(route, content=body, headers=JSON)
        assert response.status_code == 400
        check(response.json(), "body", code)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "n"])
def test_non_finite_numbers_are_refused(client: TestClient, field: str, number: str) -> None:
    body = json.dumps(COMPLETION)[:-1] + f', "{field}": {number}}}'
    response = client.post(COMPLETIONS, content=body, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("headers", "size", "status", "param", "code"),
    [
        ({}, 64 * 1024, 413, "body", "body_too_large"),
        ({"content-length": "9" * 5000}, 1, 400, "content-length", "invalid_value"),
        ({"content-length": "-1"}, 1, 400, "content-length", "invalid_value"),
        ({"content-length": "1e3"}, 1, 400, "content-length", "invalid_value"),
        ({"content-encoding": "gzip"}, 1, 415, "body", "unsupported_encoding"),
        ({"content-encoding": "Identity"}, 1, 503, None, "service_unavailable"),
        ({"content-encoding": ""}, 1, 503, None, "service_unavailable"),
    ],
)
def test_a_body_is_checked_before_it_is_read(
    client: TestClient, headers: dict[str, str], size: int, status: int, param: str | None, code: str
) -> None:
    body = json.dumps(COMPLETION | {"prompt": "a" * size})
    response = client.post(COMPLETIONS, content=body, headers={**JSON, **headers})
    assert response.status_code == status
    check(response.json(), param, code)


@pytest.mark.anyio
async def test_a_body_of_unknown_length_is_read_only_to_the_limit(client: TestClient) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b" " * 1024

    async with httpx.AsyncClient(transport=httpx.ASGITransport(client.app), base_url="http://localhost") as http:
        response = await http.post(COMPLETIONS, content=endless(), headers=JSON)
    assert response.status_code == 413
    check(response.json(), "body", "body_too_large")
    assert sent <= 64 + 2


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        *(
            ("POST", path, 404, "route_not_found")
            for path in ("/", "/v1/embeddings", "/v1/completions/", "/v1/Wilhelmina")
        ),
        *((method, path, 405, "method_not_allowed") for method, path in (("GET", COMPLETIONS), ("POST", "/v1/models"))),
    ],
)
def test_an_unknown_route_or_method_is_refused(
    client: TestClient, method: str, path: str, status: int, code: str
) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert (status == 405) == ("allow" in response.headers)
    check(response.json(), None, code)


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer nokey"}, {"authorization": "Basic one"}])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", COMPLETIONS), ("POST", CHATS), ("GET", "/v1/models"), ("GET", "/v1/privacy")]
)
def test_a_request_without_a_valid_key_is_refused(
    make_client: MakeClient, header: dict[str, str], method: str, path: str
) -> None:
    guarded = make_client(api_keys=("one", "zwölf"))
    response = guarded.request(method, path, headers=header)
    assert response.status_code == 401
    check(response.json(), None, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"


def test_probes_need_no_key(make_client: MakeClient) -> None:
    assert make_client(api_keys=("one",)).get("/health").status_code == 503


@pytest.mark.parametrize(
    ("template", "code"),
    [(None, "chat_not_supported"), ("{{ raise_exception(messages[0]['content']) }}", "invalid_value")],
)
def test_a_chat_that_the_model_has_no_template_for_is_refused(
    make_client: MakeClient, prompts: Any, monkeypatch: pytest.MonkeyPatch, template: str | None, code: str
) -> None:
    monkeypatch.setattr(prompts._tokenizer, "chat_template", template)
    response = make_client().post(CHATS, json=CHAT)
    assert response.status_code == 400
    check(response.json(), "messages", code)
