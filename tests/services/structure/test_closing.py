"""Claim: an object has only the properties that its schema names, unless the schema opens it or joins several."""

import asyncio
import json
from typing import Any

import pytest

from services.structure import grammar
from services.structure.closing import closed
from services.structure.compiler import Compiler
from tests.services.structure.test_matcher import vocabulary

NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}


def forced(schema: dict[str, Any]) -> str:
    follower = asyncio.run(Compiler(vocabulary).matcher(grammar.of_json_schema(schema)))
    return vocabulary().tokenizer.decode_str(list(follower.after(()).forced))


def test_an_object_ends_after_its_properties() -> None:
    assert forced(NAMED) == '{"a": 1}'
    assert forced({"type": "array", "items": NAMED, "minItems": 1, "maxItems": 1}) == '[{"a": 1}]'
    nested = {"type": "object", "properties": {"b": {"$ref": "#/$defs/x"}}, "required": ["b"], "$defs": {"x": NAMED}}
    assert forced(nested) == '{"b": {"a": 1}}'


@pytest.mark.parametrize(
    "opened", [{"additionalProperties": True}, {"additionalProperties": {}}, {"patternProperties": {"^b": {}}}]
)
def test_a_schema_can_open_its_object(opened: dict[str, Any]) -> None:
    assert closed(NAMED | opened) == NAMED | opened
    assert not forced(NAMED | opened).endswith("}")


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [NAMED, {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]}]},
        NAMED | {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": {"b": {"const": 2}}}}},
        NAMED | {"anyOf": [{"properties": {"b": {"const": 2}}}, {"properties": {"c": {"const": 3}}}]},
    ],
)
def test_schemas_that_join_properties_stay_as_they_are(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
    assert forced(schema).startswith('{"')


def test_values_and_names_are_no_schemas() -> None:
    values = {"enum": [{"properties": {}}], "default": NAMED}
    assert closed(values) == values
    assert forced({"const": {"properties": {"a": 1}}}) == json.dumps({"properties": {"a": 1}})
    names = {"type": "object", "properties": {"properties": {"type": "integer"}}}
    assert closed(names) == names | {"additionalProperties": False}
