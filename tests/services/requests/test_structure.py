"""Claim: the answers of a request cost together what one may cost, and a broken guard is no fault of the client."""

from typing import Any

import pytest

from privmix.requests.errors import ApiError
from privmix.requests.schema import ChatRequest
from privmix.requests.structure import structure_of
from privmix.structure.grammar import of_json_schema
from privmix.structure.trials import TrialLimits, Trials
from tests.support.structure import described, running

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
BODY = {"model": "a", "messages": [{"role": "user", "content": "Hi"}], "n": 3}


def chat(**wish: object) -> ChatRequest:
    return ChatRequest.model_validate({**BODY, **wish})


async def grammar_of(request: ChatRequest, answers: int, trials: Trials, salt: str) -> str | None:
    structure = await structure_of(request, answers, trials, salt)
    return None if structure is None else structure.grammar


@pytest.mark.anyio
async def test_many_answers_with_a_costly_structure_are_refused_by_the_number() -> None:
    request = chat(structured_outputs={"json": SCHEMA})
    async with running() as trials:
        assert await grammar_of(request, 128, trials, "salt") == of_json_schema(SCHEMA)
        tried = await trials.grammar("json", SCHEMA, "salt")
        trials._limits = TrialLimits(memory=2 * tried.memory)
        assert await grammar_of(request, 2, trials, "salt") == tried.grammar
        with pytest.raises(ApiError, match="at most 2 answers") as refusal:
            await grammar_of(request, 3, trials, "salt")
        assert (refusal.value.status, refusal.value.param) == (400, "n")
        trials._limits = TrialLimits(memory=1)
        assert await grammar_of(request, 1, trials, "salt") == tried.grammar, "its trial has shown that one is possible"


@pytest.mark.anyio
async def test_each_way_to_ask_for_a_structure_is_tried() -> None:
    function = {"type": "function", "function": {"name": "f", "parameters": {"minItems": 10**9}}}
    async with running() as trials:
        wishes: dict[str, dict[str, Any]] = {
            "structured_outputs.json": {"structured_outputs": {"json": '{"type": "array", "minItems": 1000000000}'}},
            "structured_outputs.regex": {"structured_outputs": {"regex": "["}},
            "structured_outputs.choice": {"structured_outputs": {"choice": ["a", ""]}},
            "response_format.json_schema.schema": {
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"maxItems": 9e8}}}
            },
            "tools": {"tools": [function], "tool_choice": "required"},
        }
        for field, asked in wishes.items():
            with pytest.raises(ApiError) as refusal:
                await grammar_of(chat(**asked), 1, trials, "salt")
            assert (refusal.value.status, refusal.value.param) == (400, field)
        objects: list[dict[str, Any]] = [
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
        ]
        for wish in objects:
            assert await grammar_of(chat(**wish), 1, trials, "salt") == of_json_schema({"type": "object"})
        assert await grammar_of(chat(response_format={"type": "text"}), 1, trials, "salt") is None


@pytest.mark.anyio
async def test_a_guard_that_does_not_start_is_an_error_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ApiError) as failure:
        await grammar_of(chat(structured_outputs={"regex": "a"}), 1, Trials(described), "salt")
    assert failure.value.status == 503
