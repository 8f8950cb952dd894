"""Claim: every answer is a value of its schema but for what the library lets through, whatever limit ends it."""

import json
import random
from typing import Any

import pytest

from privmix.structure import grammar
from privmix.structure.compiler import begun
from privmix.structure.errors import StructureError
from tests.services.structure.judge import SCHEMAS, draw, is_valid
from tests.support.structure import vocabulary


def answered(schema: Any, chance: random.Random, texts: int = 3) -> int:
    """Judges some answers to a schema. Returns their number, which is 0 if it is refused."""
    try:
        follower, _ = begun(grammar.of_json_schema(schema), vocabulary())
    except StructureError:
        return 0
    for _ in range(texts):
        text = draw(follower, chance)
        assert text is not None, f"left broken: {json.dumps(schema)}"
        assert is_valid(schema, text), f"{text!r} is no value of {json.dumps(schema)}"
    return texts


def test_our_own_schemas() -> None:
    accepted = [case for case in SCHEMAS if answered(case["schema"], random.Random(case["description"]), 2)]
    assert (len(SCHEMAS), len(accepted)) == (64, 42)


def test_a_name_that_must_end_with_a_letter_is_ended() -> None:
    """No byte of the name is nearer to its end than another one, so the search tries them all."""
    schema = {"type": "object", "patternProperties": {"b$": {"type": "integer"}}, "additionalProperties": False}
    assert answered(schema, random.Random(0), 10)


@pytest.mark.parametrize(("schema", "text"), [({"type": "number", "maximum": 1}, "2"), ({"const": []}, "[")])
def test_the_judge_finds_invalid_texts(schema: dict[str, Any], text: str) -> None:
    assert not is_valid(schema, text)
