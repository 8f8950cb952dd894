"""Claim: a grammar that is invalid, too large or without a text is refused, in bounded time, and quotes no text."""

import asyncio
import json
import random
import string
import time
from collections.abc import Callable
from typing import Any

import pytest

from privmix.structure import compiler, grammar
from privmix.structure.compiler import Compiler
from privmix.structure.errors import StructureError
from privmix.structure.grammar import is_choice
from privmix.structure.limits import (
    MAX_BYTES,
    MAX_CHOICES,
    MAX_COUNT,
    MAX_DEPTH,
    MAX_LENGTH,
    MAX_NODES,
    UNREACHABLE,
    without_unreachable,
)
from tests.support.structure import GRAMMARS, tokens_of, vocabulary

SECRET = "Xyzzy"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return schema


LOOP = {"type": "object", "properties": {SECRET: {"$ref": "#"}}, "required": [SECRET]}
MUTUAL = {
    "$ref": "#/$defs/a",
    "$defs": {
        "a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 1},
        "b": {"allOf": [{"$ref": "#/$defs/a"}]},
    },
}
REFUSED: dict[str, Callable[[], str]] = {
    "large": lambda: grammar.of_json_schema({"description": SECRET * MAX_BYTES}),
    "deep": lambda: grammar.of_json_schema(nested(MAX_DEPTH)),
    "wide": lambda: grammar.of_json_schema({"anyOf": [{"type": "string"}] * MAX_NODES}),
    "enumeration": lambda: grammar.of_json_schema({"enum": list(range(MAX_CHOICES + 1))}),
    "remote": lambda: grammar.of_json_schema({"$ref": f"https://example.com/{SECRET}"}),
    "dangling": lambda: grammar.of_json_schema({"$ref": f"#/$defs/{SECRET}"}),
    "false": lambda: grammar.of_json_schema(False),
    "empty enumeration": lambda: grammar.of_json_schema({"enum": []}),
    "unknown type": lambda: grammar.of_json_schema({"type": SECRET}),
    "contradiction": lambda: grammar.of_json_schema({"type": "integer", "minimum": 5, "maximum": 3}),
    "keyword": lambda: grammar.of_json_schema({"type": "array", "uniqueItems": True}),
    "pattern": lambda: grammar.of_json_schema({"type": "string", "pattern": f"{SECRET}["}),
    "itself": lambda: grammar.of_json_schema({"$ref": "#"}),
    "endless object": lambda: grammar.of_json_schema(LOOP),
    "endless array": lambda: grammar.of_json_schema(MUTUAL),
    "surrogate": lambda: grammar.of_json_schema({"const": "\ud800"}),
    "regex": lambda: grammar.of_regex(f"{SECRET}["),
    "look-around": lambda: grammar.of_regex(f"(?={SECRET})a"),
    "backreference": lambda: grammar.of_regex(rf"({SECRET})\1"),
    "long regex": lambda: grammar.of_regex("a" * (MAX_BYTES + 1)),
    "no choice": lambda: grammar.of_choice([]),
    "empty choice": lambda: grammar.of_choice([SECRET, ""]),
    "items": lambda: grammar.of_json_schema({"type": "array", "maxItems": MAX_COUNT + 1}),
    "items together": lambda: grammar.of_json_schema({"anyOf": [{"type": "array", "minItems": MAX_COUNT // 2}] * 3}),
    "items of a tool": lambda: grammar.of_tool_call({SECRET: {"properties": {"a": {"minItems": 10**30}}}}),
    "properties": lambda: grammar.of_json_schema({"type": "object", "minProperties": float(MAX_COUNT + 1)}),
    "length": lambda: grammar.of_json_schema({"type": "string", "minLength": MAX_LENGTH + 1}),
    "not a number": lambda: grammar.of_json_schema({"type": "array", "maxItems": float("nan")}),
    "text of no schema": lambda: grammar.of_kind("json", f"[{SECRET}]"),
    "choices": lambda: grammar.of_choice([str(number) for number in range(MAX_CHOICES + 1)]),
    "no tool": lambda: grammar.of_tool_call({}),
    "a tool without calls": lambda: grammar.of_tool_call({SECRET: LOOP}),
}


def compiled(make: Callable[[], str]) -> None:
    asyncio.run(Compiler(vocabulary).matcher(make()))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_answered_is_refused(kind: str) -> None:
    with pytest.raises(StructureError) as refusal:
        compiled(REFUSED[kind])
    assert SECRET.lower() not in str(refusal.value).lower()


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer"}}},
        {"enum": [1, "a", None]},
        nested(MAX_DEPTH // 2 - 1),
    ],
)
def test_recursion_that_can_end_is_accepted(schema: dict[str, Any] | bool) -> None:
    compiled(lambda: grammar.of_json_schema(schema))


@pytest.mark.parametrize("most", [UNREACHABLE, 2**32, 2**63 - 1, 1e300])
def test_a_maximum_that_no_answer_reaches_is_none(most: float) -> None:
    schema = {"type": "array", "items": {"type": "string", "maxLength": most}, "maxItems": most}
    assert without_unreachable(schema) == {"type": "array", "items": {"type": "string"}}
    compiled(lambda: grammar.of_json_schema(schema))
    named = {"const": {"maxItems": most}, "properties": {"maxItems": {"const": [{"maxItems": most}]}}}
    assert without_unreachable(named) == named, "values and names are no limits"
    compiled(lambda: grammar.of_json_schema({"const": {"maxItems": 10**6}}))


def test_references_of_a_tool_stay_within_its_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tools = {
        "first": {**schema, "$defs": {"x": {"const": 1}}},
        "second": {**schema, "$defs": {"x": {"const": 2}}},
    }
    follower = asyncio.run(Compiler(vocabulary).matcher(grammar.of_tool_call(tools)))
    tokenizer = vocabulary().tokenizer
    for name, value in (("first", 1), ("second", 2)):
        start = follower.after(()).forced
        begun = tokenizer.tokenize_str(json.dumps({"name": name})[:-2].removeprefix(tokenizer.decode_str(list(start))))
        end = follower.after((*start, *begun))
        assert tokenizer.decode_str(list(end.forced)) == f'", "arguments": {{"a": {value}}}}}'
        assert end.complete


LETTERS = string.ascii_lowercase + string.digits + " "


def words(count: int, length: int) -> list[str]:
    chance = random.Random(count * length)
    return ["".join(chance.choices(LETTERS, k=length)) for _ in range(count)]


@pytest.mark.parametrize(
    "choices",
    [
        words(1000, 60),
        words(5000, 12),
        [*words(1, 20_000), "B"],
        [*(f"A{word}" for word in words(4000, 14)), "B"],
        ["yes", "yesterday", "a\nb", '"quoted" \\ é 🎉', "(a|b)*"],
    ],
    ids=["1000 of 60", "5000 of 12", "a long one", "a late fork", "odd ones"],
)
def test_each_string_of_a_choice_can_be_finished(choices: list[str]) -> None:
    """A rule of the grammar for each string compiled, and failed after the first paid token."""
    text = grammar.of_choice(choices)
    tokenizer = vocabulary().tokenizer
    for chosen in {*random.Random(0).sample(choices, min(5, len(choices))), choices[0]}:
        follower = asyncio.run(Compiler(vocabulary).matcher(text))
        tokens = tuple(tokenizer.tokenize_str(chosen))[:2000]
        at = len(follower.after(()).forced)
        while at < len(tokens):
            at += 1 + len(follower.after(tokens[:at], len(tokens) - at).forced)
        assert chosen.startswith(tokenizer.decode_str(list(tokens)))
        last = follower.after(tokens, 0)
        end = any(last.legal[token // 8 : token // 8 + 1] != b"" for token in (0, 2))
        assert last.complete or end or len(tokens) == 2000


SPECIAL = "run <filename>, then <|im_end|>!"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: grammar.of_json_schema({"const": SPECIAL}), json.dumps(SPECIAL)),
        (lambda: grammar.of_json_schema({"enum": [SPECIAL, 1]}), json.dumps(SPECIAL)),
        (
            lambda: grammar.of_json_schema(
                {"type": "object", "properties": {SPECIAL: {"const": 1}}, "required": [SPECIAL]}
            ),
            json.dumps({SPECIAL: 1}),
        ),
        (lambda: grammar.of_choice([SPECIAL, "walk"]), SPECIAL),
        (lambda: grammar.of_regex("(run|walk) <filename>, then <.im_end.>!"), SPECIAL),
    ],
    ids=["const", "enum", "key", "choice", "regex"],
)
def test_the_text_of_a_special_token_is_text(make: Callable[[], str], text: str) -> None:
    """The engine took a forced text for the token, which its own grammar does not admit."""
    follower = asyncio.run(Compiler(vocabulary).matcher(make()))
    tokens: tuple[int, ...] = ()
    rest = text.encode()
    while rest:
        tokens += follower.after(tokens).forced
        rest = text.encode()[len(vocabulary().tokenizer.decode_bytes(list(tokens))) :]
        tokens += tuple(vocabulary().tokenizer.tokenize_bytes(rest)[:1])
    assert set(tokens_of(follower.after(tokens).legal)) <= {0, 2}, "nothing but the end may follow"
    assert vocabulary().tokenizer.decode_str(list(tokens)) == text
    assert min(tokens) > 16, "no special token"


def test_an_object_may_have_many_optional_properties() -> None:
    names = [f"p{number}" for number in range(400)]
    schema = {"type": "object", "properties": {name: {"type": "boolean"} for name in names}}
    follower = asyncio.run(Compiler(vocabulary).matcher(grammar.of_json_schema(schema)))
    for name in (names[0], names[-1]):
        tokens = tuple(vocabulary().tokenizer.tokenize_str(f'{{"{name}": true'))
        assert follower.after(tokens).complete == (name == names[-1])


@pytest.mark.parametrize(
    "make",
    [
        lambda text: grammar.of_json_schema({"anyOf": [{"const": f"A{text}"}, {"const": "B"}]}),
        lambda text: grammar.of_regex(f"A{text}|B"),
    ],
    ids=["const", "regex"],
)
def test_a_long_literal_can_be_finished_after_a_free_token(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[str], str]
) -> None:
    monkeypatch.setattr(compiler, "STATES", 100)
    (text,) = words(1, 2000)
    follower = asyncio.run(Compiler(vocabulary).matcher(make(text)))
    begun = follower.after(()).forced
    begun += tuple(vocabulary().tokenizer.tokenize_str("A"))
    position = follower.after(begun)
    assert position.complete
    assert text in vocabulary().tokenizer.decode_str(list(begun + position.forced))


def test_a_client_cannot_name_its_grammar_a_choice() -> None:
    """A choice has wider limits, because its strings bound what it can need."""
    assert is_choice(grammar.of_choice(["a", "b"]))
    for text in GRAMMARS.values():
        assert is_choice(text) == (text == GRAMMARS["choice"])


def test_a_slow_compilation_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "COMPILE_S", 0.05)
    monkeypatch.setattr(compiler, "compiled", lambda text, words: time.sleep(0.5))

    async def run() -> None:
        with pytest.raises(StructureError, match="too long"):
            await Compiler(vocabulary).matcher(GRAMMARS["choice"])

    asyncio.run(run())
