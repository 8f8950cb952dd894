"""Claim: a grammar that is invalid, too large or without a text is refused, in bounded time, and quotes no text."""

import asyncio
import json
import random
import string
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from services.structure import compiler, grammar
from services.structure.compiler import Compiler
from services.structure.errors import StructureError
from services.structure.grammar import is_choice
from services.structure.limits import MAX_BYTES, MAX_CHOICES, MAX_DEPTH, MAX_NODES
from services.structure.satisfiable import has_finite_value
from tests.services.structure.compilations import recorded
from tests.services.structure.test_matcher import GRAMMARS, vocabulary

SECRET = "Xyzzy"
ENGINES = 2
"""An answer has an engine for its text, and one that finds its end."""


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
    "lark": lambda: grammar.of_grammar(f"start: {SECRET}"),
    "not a grammar": lambda: grammar.of_grammar(SECRET),
    "endless grammar": lambda: grammar.of_grammar('start: "a" start'),
    "unproductive grammar": lambda: grammar.of_grammar("start: x\nx: x"),
    "no choice": lambda: grammar.of_choice([]),
    "empty choice": lambda: grammar.of_choice([SECRET, ""]),
    "special token": lambda: grammar.of_choice(["run <|im_end|>", "walk"]),
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
    assert has_finite_value(schema)
    compiled(lambda: grammar.of_json_schema(schema))


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


def test_a_compiler_knows_the_latest_grammars_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_CHECKED", 2)
    made = recorded(monkeypatch)

    async def run() -> None:
        own = Compiler(vocabulary)
        first, second, third = (GRAMMARS[kind] for kind in ("schema", "regex", "choice"))
        for text in (first, second, first, third, first, second):
            await own.check(text)
        assert made[::2] == made[1::2] == [first, second, third, second], "the least recently used grammar leaves"
        await asyncio.gather(*(own.check(third) for _ in range(5)))
        assert made.count(third) == 2 * ENGINES, "concurrent requests compile a grammar once"
        for salt in ("hers", "hers", "his"):
            await own.check(third, salt)
        assert made.count(third) == 4 * ENGINES, "a grammar is found under its own salt only"
        await asyncio.gather(*(own.matcher(third) for _ in range(5)))
        assert made.count(third) == 9 * ENGINES, "each answer has a compilation of its own"

    asyncio.run(run())


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


def test_a_client_cannot_name_its_grammar_a_choice() -> None:
    """A choice has wider limits, because its strings bound what it can need."""
    assert is_choice(grammar.of_choice(["a", "b"]))
    disguised = json.dumps({"grammars": [{"name": "choice", "lark_grammar": 'start: "a" ::= '}]})
    for make in (lambda: grammar.of_grammar(disguised), lambda: grammar.of_grammar(disguised.replace("::=", ""))):
        with suppress(StructureError):
            assert not is_choice(make())
    for text in GRAMMARS.values():
        assert is_choice(text) == (text == GRAMMARS["choice"])


def test_a_slow_compilation_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "COMPILE_S", 0.05)
    monkeypatch.setattr(compiler, "_compiled", lambda text, words: time.sleep(0.5))

    async def run() -> None:
        with pytest.raises(StructureError, match="too long"):
            await Compiler(vocabulary).matcher(GRAMMARS["choice"])

    asyncio.run(run())
