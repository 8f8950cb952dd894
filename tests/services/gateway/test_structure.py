"""Claim: the unmodified `openai` client gets structured answers, whole and streamed, and pays only for choices."""

import json
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.running import RunningService, settled
from tests.services.gateway.test_service import CHAT, client_of, costs

pytestmark = pytest.mark.timeout(900)


class Ticket(BaseModel):
    reason: Literal["a sore throat", "a flu shot", "a blood test"]
    urgent: bool
    doctor: Literal["Dr. Abbott", "Dr. Brown"]


TICKET = {
    "type": "object",
    "properties": {"reason": {"enum": ["a sore throat", "a flu shot"]}, "urgent": {"type": "boolean"}},
    "required": ["reason", "urgent"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "book", "description": "Books a visit.", "parameters": TICKET}},
    {"type": "function", "function": {"name": "hang_up"}},
]


@pytest.fixture
def client(service: RunningService) -> openai.OpenAI:
    return client_of(service)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "privmix", "messages": CHAT, "max_tokens": 100, **fields})


def test_a_parsed_answer_is_charged_without_its_forced_tokens(service: RunningService, client: openai.OpenAI) -> None:
    before = settled(service)
    messages: Any = CHAT
    answer = client.chat.completions.parse(model="privmix", messages=messages, response_format=Ticket, max_tokens=100)
    (choice,) = answer.choices
    assert isinstance(choice.message.parsed, Ticket)
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    usage = answer.usage.model_dump()
    assert usage["free_tokens"] > usage["completion_tokens"] / 2
    costs(service, before, usage["completion_tokens"] - usage["free_tokens"])


@pytest.mark.parametrize(
    ("structure", "matches"),
    [
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"regex": "[0-9]{3}-[0-9]{4}"}, lambda text: len(text) == 8 and text.replace("-", "").isdecimal()),
        ({"grammar": 'root ::= "a" [bc] "d"'}, lambda text: text in ("abd", "acd")),
        ({"json": TICKET}, lambda text: jsonschema.validate(json.loads(text), TICKET) is None),
    ],
    ids=["choice", "regex", "grammar", "json"],
)
def test_a_completion_follows_vllms_structures(client: openai.OpenAI, structure: Any, matches: Any) -> None:
    for stream in (False, True):
        answer: Any = client.completions.create(
            model="privmix",
            prompt="The answer:",
            max_tokens=60,
            stream=stream,
            extra_body={"structured_outputs": structure},
        )
        chunks = list(answer) if stream else [answer]
        assert matches("".join(chunk.choices[0].text for chunk in chunks))
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "function", "function": {"name": "book"}}, {"book"}), ("required", {"book", "hang_up"})],
    ids=["named", "required"],
)
def test_a_tool_is_called(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    answer = chat(client, tools=TOOLS, tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("tool_calls", None)
    called(call.function.name, call.function.arguments, names)

    chunks = [chunk.choices[0] for chunk in chat(client, tools=TOOLS, tool_choice=choice, stream=True)]
    pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [piece.function.name for piece in pieces[1:]] == [None] * (len(pieces) - 1)
    assert {piece.index for piece in pieces} == {0}
    assert pieces[0].id.startswith("call_")
    called(pieces[0].function.name, "".join(piece.function.arguments for piece in pieces), names)
    assert chunks[-1].finish_reason == "tool_calls"


def called(name: str, arguments: str, names: set[str]) -> None:
    assert name in names
    jsonschema.validate(json.loads(arguments), TICKET if name == "book" else {"const": {}})


def test_a_text_without_an_alternative_costs_nothing(service: RunningService, client: openai.OpenAI) -> None:
    before = settled(service)
    answer: Any = chat(client, extra_body={"structured_outputs": {"choice": ["We open at nine."]}}, n=3)
    assert [choice.message.content for choice in answer.choices] == ["We open at nine."] * 3
    assert answer.usage.model_dump()["free_tokens"] == answer.usage.completion_tokens > 0
    costs(service, before, 0)


def test_an_invalid_structure_costs_nothing_and_a_long_one_is_cut(
    service: RunningService, client: openai.OpenAI
) -> None:
    before = settled(service)
    schemas: list[dict[str, Any]] = [{"type": "rat"}, {"enum": []}, {"$ref": "#"}]
    for schema in schemas:
        wish = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body = {"model": "privmix", "messages": CHAT, "response_format": wish}
        refusal = httpx.post(f"{service.base_url}/v1/chat/completions", json=body, timeout=60)
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "response_format.json_schema.schema")
    costs(service, before, 0)
    wish = {"type": "json_schema", "json_schema": {"name": "a", "schema": TICKET}}
    cut = chat(client, response_format=wish, max_tokens=2)
    assert (cut.choices[0].finish_reason, cut.usage.model_dump()["free_tokens"]) == ("length", 2)
    costs(service, before, 0)
