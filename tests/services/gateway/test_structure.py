"""Claim: the unmodified `openai` client gets structured answers, whole and streamed, and pays only for choices."""

import json
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.running import RunningService, settled
from tests.support.clients import CHAT, client_of, costs

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
        ({"json": TICKET}, lambda text: jsonschema.validate(json.loads(text), TICKET) is None),
    ],
    ids=["choice", "regex", "json"],
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


def test_a_text_without_an_alternative_costs_nothing(service: RunningService, client: openai.OpenAI) -> None:
    before = settled(service)
    answer: Any = chat(client, extra_body={"structured_outputs": {"choice": ["We open at nine."]}}, n=3)
    assert [choice.message.content for choice in answer.choices] == ["We open at nine."] * 3
    assert answer.usage.model_dump()["free_tokens"] == answer.usage.completion_tokens > 0
    costs(service, before, 0)


def refused(service: RunningService, **fields: Any) -> dict[str, Any]:
    """Returns the error of a request that is invalid."""
    body = {"model": "privmix", "messages": CHAT, **fields}
    refusal = httpx.post(f"{service.base_url}/v1/chat/completions", json=body, timeout=60)
    assert refusal.status_code == 400
    error: dict[str, Any] = refusal.json()["error"]
    return error


def wish(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


ROOMY = {
    "type": "object",
    "properties": {
        "summary": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "doctor": {"enum": ["Dr. Abbott of the clinic in the old town", "nobody"]},
    },
    "required": ["summary", "tags", "doctor"],
}


def test_an_answer_ends_well_however_few_tokens_it_has(service: RunningService, client: openai.OpenAI) -> None:
    before = settled(service)
    error = refused(service, response_format=wish(ROOMY), max_tokens=4)
    assert error["param"] == "max_tokens"
    shortest = int(error["message"].split("at least ")[1])
    assert refused(service, response_format=wish(ROOMY), max_completion_tokens=4)["param"] == "max_completion_tokens"
    long = {"type": "string", "minLength": 60_000}
    assert refused(service, response_format=wish(long))["param"] == "response_format.json_schema.schema"
    costs(service, before, 0)
    for room in (0, 1, 2, 5, 12):
        answer = chat(client, response_format=wish(ROOMY), max_tokens=shortest + room, n=2, stop=['"', ","])
        for choice in answer.choices:
            jsonschema.validate(json.loads(choice.message.content), ROOMY)
            assert choice.finish_reason == "stop"
        assert answer.privmix["stop"] == "ignored"
        assert answer.usage.completion_tokens <= 2 * (shortest + room)
