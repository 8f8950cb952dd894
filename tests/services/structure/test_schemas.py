"""Claim: every answer is a value of its schema but for what the library lets through, whatever limit ends it.

The judge is the `jsonschema` package (`judge.py`).
"""

import json
import random
from typing import Any

import jsonschema
import pytest

from privmix.structure import grammar
from privmix.structure.compiler import begun
from privmix.structure.errors import StructureError
from tests.services.structure.judge import LETS_THROUGH, SCHEMAS, draw, is_valid
from tests.services.structure.random_schemas import random_schema
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
    accepted = [case for case in SCHEMAS if answered(case["schema"], random.Random(case["description"]), 5)]
    assert (len(SCHEMAS), len(accepted)) == (64, 42)
    for case in accepted:
        for instance in case["tests"]:
            text = json.dumps(instance["data"], ensure_ascii=False)
            if text not in LETS_THROUGH and admits(case["schema"], text):
                assert is_valid(case["schema"], text), instance


def test_random_schemas() -> None:
    assert sum(answered(random_schema(random.Random(seed)), random.Random(seed)) > 0 for seed in range(300)) > 100


def test_a_name_that_must_end_with_a_letter_is_ended() -> None:
    """No byte of the name is nearer to its end than another one, so the search tries them all."""
    schema = {"type": "object", "patternProperties": {"b$": {"type": "integer"}}, "additionalProperties": False}
    assert answered(schema, random.Random(0), 40)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("thousand", range(1, 6))
def test_thousands_of_random_schemas(thousand: int) -> None:
    seeds = range(1000 * thousand, 1000 * (thousand + 1))
    assert sum(answered(random_schema(random.Random(seed)), random.Random(seed)) > 0 for seed in seeds) > 400


def admits(schema: Any, text: str) -> bool:
    """Tells whether a text can be followed to its end."""
    follower, _ = begun(grammar.of_json_schema(schema), vocabulary())
    try:
        position = follower.after(tuple(vocabulary().tokenizer.tokenize_str(text)))
    except StructureError:
        return False
    return position.end == () or bool(int.from_bytes(position.legal, "little") & vocabulary().ends)


@pytest.mark.parametrize("text", LETS_THROUGH)
def test_what_the_library_lets_through(text: str) -> None:
    """If one of these fails, the library has become stricter, and the package's docstring says too much."""
    schema = LETS_THROUGH[text]
    assert admits(schema, text)
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    value = json.loads(text, object_pairs_hook=_once)
    assert value in (float("inf"), None) or not judge.is_valid(value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any] | None:
    """Returns an object; None if a name is repeated."""
    return dict(pairs) if len({name for name, _ in pairs}) == len(pairs) else None


@pytest.mark.parametrize(("schema", "text"), [({"type": "number", "maximum": 1}, "2"), ({"const": []}, "[")])
def test_the_judge_finds_invalid_texts(schema: dict[str, Any], text: str) -> None:
    assert not is_valid(schema, text)
