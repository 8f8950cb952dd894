"""Claim: an invalid request is refused before it reaches the coordinator, by an error that names the parameter.

Errors have OpenAI's format and repeat no input of the client.
"""

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
    ({"model": 3}, "model", "invalid_type"),
    ({"model": ["privmix"]}, "model", "invalid_type"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 5}, "n", "invalid_value"),
    ({"n": 10**30}, "n", "invalid_value"),
    ({"n": "2"}, "n", "invalid_type"),
    ({"n": 2.0}, "n", "invalid_type"),
    ({"n": True}, "n", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": "16"}, "max_tokens", "invalid_type"),
    ({"max_tokens": 257}, "max_tokens", "invalid_value"),
    ({"temperature": 0}, "temperature", "unsupported_value"),
    ({"temperature": 1e-300}, "temperature", "unsupported_value"),
    ({"temperature": -0.5}, "temperature", "invalid_value"),
    ({"temperature": 2.5}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "unsupported_value"),
    ({"top_p": 1.01}, "top_p", "invalid_value"),
    ({"top_p": []}, "top_p", "invalid_type"),
    ({"top_k": 1}, "top_k", "unsupported_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"top_k": 4.5}, "top_k", "invalid_type"),
    ({"stop": 7}, "stop", "invalid_type"),
    ({"response_format": "json"}, "response_format", "invalid_type"),
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
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
    ({"structured_outputs": {"grammar": SECRET}}, "structured_outputs.grammar", "unknown_parameter"),
    ({"structured_outputs": {"json": SECRET}}, "structured_outputs.json", "invalid_value"),
    ({"structured_outputs": {"json": {"$ref": SECRET}}}, "structured_outputs.json", "invalid_value"),
    ({"structured_outputs": {"structural_tag": SECRET}}, "structured_outputs.structural_tag", "unknown_parameter"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs.regex",
        "invalid_value",
    ),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", ""]}, "stop", "invalid_value"),
    ({"stop": ["a", 1]}, "stop", "invalid_type"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value"),
    ({"stop": "x" * 129}, "stop", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    ({"stream": True, "stream_options": {"pad": 1}}, "stream_options.pad", "unknown_parameter"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_parameter",
    ),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
    ({"frequency_penalty": False}, "frequency_penalty", "unsupported_parameter"),
    ({"presence_penalty": -2}, "presence_penalty", "unsupported_parameter"),
    ({"logit_bias": {"50256": -100}}, "logit_bias", "unsupported_parameter"),
    ({"logprobs": True}, "logprobs", "unsupported_parameter"),
    ({"seed": 42}, "seed", "unsupported_parameter"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "unsupported_parameter"),
    ({"min_p": 0.1}, "min_p", "unsupported_parameter"),
    ({"min_tokens": 1}, "min_tokens", "unsupported_parameter"),
    ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
    ({"guided_json": {"type": "integer"}}, "guided_json", "unsupported_parameter"),
    ({"guided_json": {}}, "guided_json", "unsupported_parameter"),
    ({"guided_choice": ["a"]}, "guided_choice", "unsupported_parameter"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "unsupported_parameter"),
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
    ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt": {"text": SECRET}}, "prompt", "invalid_type"),
    ({"prompt": ["a", 1]}, "prompt", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
    ({"prompt": [1.5]}, "prompt", "invalid_type"),
    ({"prompt": [True]}, "prompt", "invalid_type"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": [49_152]}, "prompt", "invalid_value"),
    ({"prompt": [[1], [2**70]]}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 5}, "prompt", "invalid_value"),
    ({"prompt": [1] * 512}, "prompt", "context_length_exceeded"),
    ({"prompt": "word " * 600}, "prompt", "context_length_exceeded"),
    ({"prompt": [1] * 500, "max_tokens": 13}, "max_tokens", "context_length_exceeded"),
    ({"prompt": [[1], [1] * 500], "max_tokens": 13}, "max_tokens", "context_length_exceeded"),
    ({"echo": "yes"}, "echo", "invalid_type"),
    ({"echo": True, "logprobs": 1}, "logprobs", "unsupported_parameter"),
    ({"logprobs": 0}, "logprobs", "unsupported_parameter"),
    ({"best_of": 0}, "best_of", "invalid_value"),
    ({"best_of": 3}, "best_of", "unsupported_value"),
    ({"n": 2, "best_of": 3}, "best_of", "unsupported_value"),
    ({"n": 2, "best_of": 1}, "best_of", "unsupported_value"),
    ({"best_of": "2"}, "best_of", "invalid_type"),
    ({"suffix": "the end"}, "suffix", "unsupported_parameter"),
    ({"messages": CHAT["messages"]}, "messages", "unknown_parameter"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown_parameter"),
]


def say(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": SECRET, **message}]}


OF_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": SECRET}, "messages", "invalid_type"),
    ({"messages": [SECRET]}, "messages[0]", "invalid_type"),
    (say(role=None), "messages[0].role", "missing_required_parameter"),
    (say(role="tool"), "messages[0].role", "invalid_value"),
    (say(tool_call_id="a"), "messages[0].tool_call_id", "unsupported_parameter"),
    (say(role="function"), "messages[0].role", "invalid_value"),
    (say(content=None), "messages[0].content", "missing_required_parameter"),
    (say(content=4), "messages[0].content", "invalid_type"),
    (say(content=[]), "messages[0].content", "invalid_type"),
    (say(content=[SECRET]), "messages[0].content", "invalid_type"),
    (say(content=[{"type": "text", "text": 4}]), "messages[0].content", "invalid_type"),
    (say(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content", "unsupported_value"),
    (say(name="Wilhelmina"), "messages[0].name", "unsupported_parameter"),
    (say(tool_calls=[{"id": "a"}]), "messages[0].tool_calls", "unsupported_parameter"),
    (say(mood="bright"), "messages[0].mood", "unknown_parameter"),
    (
        {"messages": [*CHAT["messages"], {"role": "user", "content": "word " * 600}]},
        "messages",
        "context_length_exceeded",
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
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
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"audio": {"voice": "ash"}}, "audio", "unsupported_parameter"),
    ({"metadata": {"a": "b"}}, "metadata", "unsupported_parameter"),
    ({"store": True}, "store", "unsupported_parameter"),
    ({"service_tier": "flex"}, "service_tier", "unsupported_parameter"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
    ({"verbosity": "low"}, "verbosity", "unsupported_parameter"),
    ({"prediction": {"type": "content"}}, "prediction", "unsupported_parameter"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    ({"prompt": "a"}, "prompt", "unknown_parameter"),
    ({"echo": True}, "echo", "unknown_parameter"),
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


def test_vllms_older_fields_name_their_successor(client: TestClient) -> None:
    message = client.post(CHATS, json=CHAT | {"guided_regex": "[0-9]+"}).json()["error"]["message"]
    assert "structured_outputs" in message


def test_greedy_decoding_is_refused_with_the_reason_and_the_fix(client: TestClient) -> None:
    message = client.post(COMPLETIONS, json=COMPLETION | {"temperature": 0}).json()["error"]["message"]
    assert "public model alone" in message
    assert "0.01" in message


@pytest.mark.parametrize("route", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b'{"prompt": "Wilhelmina', "body"),
        (b'{"prompt": Wilhelmina}', "body"),
        (b"\xff\xfe{}", "body"),
        (b'{"model": "privmix", "prompt": "\xc3\x28"}', "body"),
        (b'{"model": "privmix", "prompt": "\\ud800"}', "body"),
        (b"[" * 50_000, "body"),
        (b'{"n": ' + b"9" * 10_000 + b"}", "body"),
    ],
)
def test_a_body_that_is_not_json_in_utf8_is_refused(client: TestClient, route: str, body: bytes, param: str) -> None:
    response = client.post(route, content=body, headers=JSON)
    assert response.status_code == 400
    check(response.json(), param, "invalid_json")


@pytest.mark.parametrize("body", [b"null", b"3", b"[]", b'"Wilhelmina"', b"NaN"])
def test_a_body_that_is_not_an_object_is_refused(client: TestClient, body: bytes) -> None:
    response = client.post(COMPLETIONS, content=body, headers=JSON)
    assert response.status_code == 400
    check(response.json(), "body", "invalid_type")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "n", "max_tokens", "top_k"])
def test_non_finite_numbers_are_refused(client: TestClient, field: str, number: str) -> None:
    body = json.dumps(COMPLETION)[:-1] + f', "{field}": {number}}}'
    response = client.post(COMPLETIONS, content=body, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_a_body_over_the_limit_is_refused(client: TestClient) -> None:
    response = client.post(COMPLETIONS, json=COMPLETION | {"prompt": "a" * (64 * 1024)})
    assert response.status_code == 413
    check(response.json(), "body", "body_too_large")


@pytest.mark.parametrize("number", ["9" * 5000, "-1", "1e3"])
def test_a_length_that_is_no_number_is_refused(client: TestClient, number: str) -> None:
    response = client.post(COMPLETIONS, content=b"{}", headers={**JSON, "content-length": number})
    assert response.status_code == 400
    check(response.json(), "content-length", "invalid_value")


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


def test_a_compressed_body_is_refused(client: TestClient) -> None:
    response = client.post(COMPLETIONS, json=COMPLETION, headers={"content-encoding": "gzip"})
    assert response.status_code == 415
    check(response.json(), "body", "unsupported_encoding")


def test_a_body_that_an_upgrade_lost_says_so(client: TestClient) -> None:
    headers = JSON | {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAEA"}
    response = client.post(COMPLETIONS, content=b"", headers=headers)
    assert response.status_code == 400
    check(response.json(), "upgrade", "invalid_value")
    assert "HTTP_1_1" in response.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
def test_a_body_as_it_is_may_say_so(client: TestClient, encoding: str) -> None:
    response = client.post(COMPLETIONS, json=COMPLETION, headers={"content-encoding": encoding})
    assert response.status_code == 503, "all checks are passed, and there are no actors"


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/embeddings", "/v1/completions/", "/doc", "/v1/Wilhelmina"])
def test_an_unknown_route_is_refused(client: TestClient, path: str) -> None:
    response = client.post(path, json=COMPLETION)
    assert response.status_code == 404
    check(response.json(), None, "route_not_found")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", COMPLETIONS), ("PUT", CHATS), ("POST", "/v1/models"), ("DELETE", "/v1/privacy")]
)
def test_an_unsupported_method_is_refused(client: TestClient, method: str, path: str) -> None:
    response = client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"]
    check(response.json(), None, "method_not_allowed")


def test_an_unknown_model_has_no_description(client: TestClient) -> None:
    response = client.get("/v1/models/part-000")
    assert response.status_code == 404
    check(response.json(), "model", "model_not_found")


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


@pytest.mark.parametrize("key", ["one", "two"])
def test_a_request_with_a_key_is_accepted(make_client: MakeClient, key: str) -> None:
    guarded = make_client(api_keys=("one", "two"))
    assert guarded.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


def test_a_key_that_sends_invalid_requests_waits_and_others_do_not(make_client: MakeClient) -> None:
    """The parsing of an invalid request takes time of others, and no share limits it."""
    client = make_client(api_keys=("hers", "his"), invalid_per_minute=3)
    hers, his = ({"authorization": f"Bearer {key}"} for key in ("hers", "his"))
    assert [client.post(COMPLETIONS, json=COMPLETION, headers=hers).status_code for _ in range(5)] == [503] * 5
    invalid: tuple[Any, ...] = ({**COMPLETION, "n": 0}, {**COMPLETION, "prompt": "a" * 70_000}, [])
    for body in invalid:
        assert client.post(COMPLETIONS, json=body, headers=hers).status_code in (400, 413)
    refused = client.post(COMPLETIONS, json=COMPLETION, headers=hers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_invalid_requests")
    assert "3 invalid requests per minute" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert client.post(COMPLETIONS, json=COMPLETION, headers=his).status_code == 503


def test_clients_without_keys_do_not_limit_each_other(make_client: MakeClient) -> None:
    client = make_client(invalid_per_minute=1)
    assert [client.post(COMPLETIONS, json=[]).status_code for _ in range(3)] == [400] * 3


def test_probes_need_no_key(make_client: MakeClient) -> None:
    assert make_client(api_keys=("one",)).get("/health").status_code == 503


def test_a_chat_without_a_chat_template_is_refused(
    make_client: MakeClient, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts._tokenizer, "chat_template", None)
    response = make_client().post(CHATS, json=CHAT)
    assert response.status_code == 400
    check(response.json(), "messages", "chat_not_supported")


def test_a_chat_that_its_template_refuses_is_refused(
    make_client: MakeClient, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts._tokenizer, "chat_template", "{{ raise_exception(messages[0]['content']) }}")
    response = make_client().post(CHATS, json=CHAT)
    assert response.status_code == 400
    check(response.json(), "messages", "invalid_value")
