"""Claim: pydantic describes no more than the first errors of a body, so a large invalid one costs a gateway little."""

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from privmix.gateway.errors import from_validation
from privmix.gateway.schema import ChatRequest, CompletionRequest, TokenizeRequest

SIZE = 1 << 20
MODEL = {"model": "privmix"}
CHAT = {**MODEL, "messages": [{"role": "user", "content": "a"}]}


def many(item: str) -> list[Any]:
    return [json.loads(item)] * (SIZE // (len(item) + 1))


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        (ChatRequest, {**MODEL, "messages": many("{}")}, "messages[0].role"),
        (ChatRequest, {**CHAT, "structured_outputs": {"choice": many("0")}}, "structured_outputs.choice[0]"),
        (ChatRequest, {**MODEL, "messages": [{"role": "user", "content": many("{}")}]}, "messages[0].content"),
        (CompletionRequest, {**MODEL, "prompt": many("{}")}, "prompt"),
        (CompletionRequest, {**MODEL, "prompt": [many('"a"')]}, "prompt"),
        (CompletionRequest, {**MODEL, "prompt": "a", "stop": many("0")}, "stop"),
        (CompletionRequest, {**MODEL, "prompt": "a", **{f"a{number}": 1 for number in range(SIZE // 12)}}, "a0"),
        (TokenizeRequest, {**MODEL, "messages": many("{}")}, "messages[0].role"),
    ],
)
def test_a_large_invalid_body_is_refused_with_its_first_errors(
    model: type[BaseModel], body: dict[str, Any], param: str
) -> None:
    with pytest.raises(ValidationError) as failed:
        model.model_validate_json(json.dumps(body))
    assert failed.value.error_count() < 100
    refusal = from_validation(failed.value)
    assert (refusal.status, refusal.param) == (400, param)
