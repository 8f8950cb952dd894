"""Claim: the known end of a text completes it, whatever follows, and an engine that reaches a limit changes nothing."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from privmix.structure import ending, grammar
from privmix.structure.compiler import begun, compiled
from privmix.structure.ending import EndFinder
from privmix.structure.errors import StructureError
from privmix.structure.vocabulary import BYTES
from tests.support.structure import GRAMMARS, matcher, vocabulary, words

VALUES: dict[str, tuple[Any, str]] = {
    "the shortest of several": ({"enum": ["administrator with all rights", "b"]}, '"b"'),
    "no item": ({"type": "array", "items": {"type": "string"}}, "[]"),
    "some items": ({"type": "array", "items": {"type": "boolean"}, "minItems": 2}, "[true, true]"),
    "a long string": ({"type": "string", "minLength": 40}, ""),
    "the end of a recursion": (
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        '{"next": null}',
    ),
    "no optional property": ({"type": "object", "properties": {"a": {"type": "string"}}}, "{}"),
    "a pattern": ({"type": "string", "pattern": r"^[A-Z]{2}-\d{3}$"}, '"AA-000"'),
    "digits that may go on": (
        {"type": "object", "properties": {"a": {"pattern": r"^\d+(\.\d{1,2})?$"}}, "required": ["a", "b"]},
        "",
    ),
    "an address": ({"type": "string", "format": "email"}, ""),
}


def whole(text: str) -> str:
    """Returns the text of the forced beginning and the end after it."""
    begun = matcher(text).after(())
    assert begun.end is not None
    return vocabulary().tokenizer.decode_str([*begun.forced, *begun.end])


@pytest.mark.parametrize("kind", VALUES)
def test_the_end_of_an_empty_text_is_a_short_value(kind: str) -> None:
    schema, expected = VALUES[kind]
    found = whole(grammar.of_json_schema(schema))
    json.loads(found)
    assert found == expected or not expected


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (grammar.of_regex(r"(.|\n)*Answer: [CD]"), "Answer: C"),
        (grammar.of_regex(r"(.|\n)*</end>"), "</end>"),
        (grammar.of_json_schema({"type": "string", "pattern": "^[a-z ]*Answer: [AB]$"}), '"Answer: A"'),
    ],
)
def test_what_must_stand_at_the_end_of_free_text_is_found(text: str, end: str) -> None:
    follower, start = begun(text, words())
    assert start.end is not None
    assert words().tokenizer.decode_str([*start.forced, *start.end]) == end
    begin = words().tokenizer.tokenize_str(end[:1] + "so")
    position = follower.after(begin)
    assert position.end is not None
    assert words().tokenizer.decode_str([*position.forced, *position.end]).endswith(end[1:])


def test_an_end_that_no_search_finds_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "AHEAD_STATES", 20)
    monkeypatch.setattr(ending, "FAR_STATES", 50)
    monkeypatch.setattr(ending, "NEAR_STATES", 1)
    text = grammar.of_regex(r"(.|\n)*Answer: [AB]")
    with pytest.raises(StructureError, match="ends soon"):
        matcher(text)


class Failing:
    """Passes calls to an engine, which reports an error from its third mask on."""

    def __init__(self, engine: LLMatcher) -> None:
        self._engine = engine
        self._masks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def compute_bitmask(self) -> bytes:
        self._masks += 1
        return self._engine.compute_bitmask()

    def is_error(self) -> bool:
        return self._masks > 2


def test_an_engine_that_reaches_a_limit_is_replaced() -> None:
    text = GRAMMARS["schema"]
    made: list[Failing] = []

    def compile_() -> Any:
        engine = compiled(text, BYTES)
        made.append(Failing(engine))
        return made[-1] if len(made) < 2 else engine

    begun = matcher(text).after(())
    assert EndFinder(compile_, vocabulary(), text).after(begun.forced) == begun.end
    assert len(made) == 2
