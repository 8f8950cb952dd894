"""Claim: pydantic describes no more than the first errors of a body, so a large invalid one costs a gateway little."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from privmix.gateway.app import BODIES
from privmix.gateway.errors import from_validation
from privmix.gateway.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

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
        (CompletionRequest, {**MODEL, "prompt": many("{}")}, "prompt"),
        (CompletionRequest, {**MODEL, "prompt": "a", "stop": many("0")}, "stop"),
        (CompletionRequest, {**MODEL, "prompt": "a", **{f"a{number}": 1 for number in range(SIZE // 12)}}, "a0"),
        (TokenizeRequest, {**MODEL, "messages": many("{}")}, "messages[0].role"),
        (DetokenizeRequest, {**MODEL, "tokens": many("{}")}, "tokens[0]"),
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


def sequences(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields the core schemas of all lists and tuples in a core schema."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple"):
            yield schema
        for key, part in schema.items():
            if key not in ("metadata", "json_schema_input_schema"):  # they only describe the field in OpenAPI
                yield from sequences(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from sequences(part)


@pytest.mark.parametrize("model", BODIES)
def test_every_list_of_a_body_ends_at_its_first_error(model: type[BaseModel]) -> None:
    assert all(schema.get("fail_fast") for schema in sequences(model.__pydantic_core_schema__))


def test_the_lists_of_a_body_are_found() -> None:
    assert len([*sequences(ChatRequest.__pydantic_core_schema__)]) >= 3
