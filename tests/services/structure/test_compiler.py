"""Claim: what is invalid, too large or without a text is refused in bounded time, and no refusal quotes any of it."""

import asyncio
import json
import random
import string
import threading
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import pytest

from privmix.structure import grammar, limits
from privmix.structure.compiler import Compiler, begun
from privmix.structure.errors import StructureError
from privmix.structure.limits import (
    MAX_BYTES,
    MAX_CHOICES,
    MAX_COUNT,
    MAX_DEPTH,
    MAX_LENGTH,
    MAX_PATTERNS,
    MAX_PROPERTIES,
    MAX_REPEATS,
    MAX_STEPS,
)
from privmix.structure.vocabulary import Vocabulary
from tests.support.structure import GRAMMARS, bytewise, matcher, tokens_of, vocabulary, words

SECRET = "Xyzzy"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return schema


def doubling(keyword: str) -> dict[str, Any]:
    """Returns a schema each of whose definitions refers twice to the next one."""
    twice = {f"a{at}": {"type": "object", keyword: [{"$ref": f"#/$defs/a{at + 1}"}] * 2} for at in range(40)}
    return {"$ref": "#/$defs/a0", "$defs": {**twice, "a40": {"type": "object"}}}


LOOP = {"type": "object", "properties": {SECRET: {"$ref": "#"}}, "required": [SECRET]}
NAMED: dict[str, tuple[Any, str]] = {
    "deep": (nested(MAX_DEPTH), "levels"),
    "enumeration": ({"enum": list(range(MAX_CHOICES + 1))}, "enumerations"),
    "items": ({"type": "array", "maxItems": MAX_COUNT + 1}, "maxItems"),
    "items together": ({"anyOf": [{"type": "array", "minItems": MAX_COUNT // 2}] * 3}, "together"),
    "nested items": ({"maxItems": 4000, "items": {"maxItems": 4000, "items": {"maxItems": 4000}}}, "together"),
    "counts of properties": ({"type": "object", "minProperties": float(MAX_COUNT + 1)}, "minProperties"),
    "properties": ({"properties": {f"p{at}": {} for at in range(MAX_PROPERTIES + 1)}}, "properties"),
    "patterns": ({"patternProperties": {f"^{at}_": {} for at in range(MAX_PATTERNS + 1)}}, "patternProperties"),
    "length": ({"type": "string", "maxLength": MAX_LENGTH + 1}, "maxLength"),
    "step": ({"type": "integer", "multipleOf": MAX_STEPS + 1}, "multipleOf"),
    "fine step": ({"type": "number", "multipleOf": float(Decimal(MAX_STEPS + 1).scaleb(-7))}, "multipleOf"),
    "repetitions": ({"type": "string", "pattern": f"^(a|b){{{MAX_REPEATS + 1}}}$"}, "repetitions"),
    "infinite": ({"type": "array", "maxItems": float("inf")}, "maxItems"),
    "repetitions of a name": ({"patternProperties": {f"a{{1,{MAX_REPEATS}0}}": {}}}, "repetitions"),
    "keyword": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "keyword within": ({"properties": {"a": {"not": {"const": SECRET}}}}, "not"),
    "format": ({"type": "string", "format": SECRET}, "format"),
    "overlap": ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf"),
    "look-ahead": ({"type": "string", "pattern": f"^(?={SECRET})"}, "regular expression"),
    "other document": ({"$ref": f"https://example.com/{SECRET}"}, ""),
    "not a number": ({"type": "array", "maxItems": float("nan")}, "number"),
    "a long number": ({"const": 10**5000}, "number"),
    "false": (False, "no value"),
    "empty enumeration": ({"enum": []}, "no value"),
    "unknown type": ({"type": SECRET}, ""),
    "itself": ({"$ref": "#"}, ""),
    "endless object": (LOOP, ""),
    "surrogate": ({"const": "\ud800"}, "surrogate"),
    "large": ({"description": SECRET * MAX_BYTES}, "bytes"),
    "doubling": (doubling("anyOf"), "complex"),
    "alternatives of alternatives": (
        {"allOf": [{"anyOf": [{"properties": {f"{a}{b}": {}}} for b in range(4)]} for a in range(10)]},
        "complex",
    ),
    "text of no schema": (f"[{SECRET}]", "JSON text"),
}
OTHERS: dict[str, Callable[[], str]] = {
    "regex": lambda: grammar.of_regex(f"{SECRET}["),
    "backreference": lambda: grammar.of_regex(rf"({SECRET})\1"),
    "long regex": lambda: grammar.of_regex("a" * (MAX_BYTES + 1)),
    "nested groups": lambda: grammar.of_regex("(" * 10_000 + "a" + ")" * 10_000),
    "repetitions of a regex": lambda: grammar.of_regex("a{1000000000}"),
    "no choice": lambda: grammar.of_choice([]),
    "empty choice": lambda: grammar.of_choice([SECRET, ""]),
    "choices": lambda: grammar.of_choice([str(number) for number in range(MAX_CHOICES + 1)]),
}


def refusal(make: Callable[[], str]) -> str:
    with pytest.raises(StructureError) as refused:
        begun(make(), vocabulary())
    assert SECRET.lower() not in str(refused.value).lower()
    return str(refused.value)


@pytest.mark.parametrize("kind", [*NAMED, *OTHERS])
def test_what_cannot_be_answered_is_refused_with_the_reason(kind: str) -> None:
    if kind in OTHERS:
        refusal(OTHERS[kind])
    else:
        schema, reason = NAMED[kind]
        assert reason in refusal(partial(grammar.of_json_schema, schema))


def test_a_client_cannot_choose_the_engines_options() -> None:
    lenient = {"x-guidance": {"lenient": True, "whitespace_flexible": True}}
    assert "not" in refusal(lambda: grammar.of_json_schema({**lenient, "not": {"type": "null"}}))
    assert grammar.of_json_schema({"const": 1, **lenient}) == grammar.of_json_schema({"const": 1})


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
        {"const": {"maxItems": 10**6}},
        {"properties": {"maxItems": {"const": [{"maxItems": 10**6}]}}},
        {"type": "string", "pattern": r"^\x{100000}$"},
        {"type": "number", "multipleOf": 0.01},
        doubling("prefixItems"),
        nested(MAX_DEPTH // 2 - 1),
    ],
)
def test_what_only_looks_like_too_much_is_accepted(schema: dict[str, Any] | bool) -> None:
    begun(grammar.of_json_schema(schema), vocabulary())


def test_an_object_is_closed_unless_its_schema_says_otherwise() -> None:
    named = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    begun_, named_ = '{"a": 1', {"x": named}
    closed: list[tuple[Any, str]] = [
        (named, begun_),
        ({"anyOf": [{"$ref": "#/$defs/x"}, {"const": 2}], "$defs": named_}, begun_),
        ({"type": "array", "items": named, "maxItems": 1}, f"[{begun_}"),
        ({"properties": {"properties": named}, "required": ["properties"]}, f'{{"properties": {begun_}'),
        ({"oneOf": [named, {"type": "null"}]}, begun_),
    ]
    opened: list[tuple[Any, str]] = [
        ({**named, "additionalProperties": True}, begun_),
        ({**named, "patternProperties": {"^b": {}}}, begun_),
        ({**named, "required": ["a", "b"]}, begun_),
        ({**named, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, begun_),
        ({"allOf": [named, {"properties": {"b": {}}}]}, begun_),
        ({"type": "object"}, begun_),
    ]
    for schema, text in (*closed, *opened):
        follows = matcher(grammar.of_json_schema(schema)).after(tuple(vocabulary().tokenizer.tokenize_str(text)))
        further = vocabulary().tokenizer.decode_str([*follows.forced[:1]]), tokens_of(follows.legal)
        goes_on = further[0] or "".join(vocabulary().tokenizer.decode_str([token]) for token in further[1])
        assert ("," in goes_on) == ((schema, text) in opened), schema


LETTERS = string.ascii_lowercase + string.digits + " "


def strings(count: int, length: int) -> list[str]:
    chance = random.Random(count * length)
    return ["".join(chance.choices(LETTERS, k=length)) for _ in range(count)]


@pytest.mark.parametrize(
    "choices",
    [
        strings(1000, 60),
        strings(5000, 12),
        [*strings(1, 20_000), "B"],
        [*(f"A{word}" for word in strings(4000, 14)), "B"],
        ["yes", "yesterday", "a\nb", '"quoted" \\ é 🎉', "(a|b)*"],
    ],
    ids=["1000 of 60", "5000 of 12", "a long one", "a late fork", "odd ones"],
)
def test_each_string_of_a_choice_can_be_finished(choices: list[str]) -> None:
    """A rule of the grammar for each string compiled, and failed after the first paid token."""
    text = grammar.of_choice(choices)
    tokenizer = vocabulary().tokenizer
    for chosen in {*random.Random(0).sample(choices, min(5, len(choices))), choices[0]}:
        follower = matcher(text)
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
    follower = matcher(make())
    tokens: tuple[int, ...] = ()
    rest = text.encode()
    while rest:
        tokens += follower.after(tokens).forced
        rest = text.encode()[len(vocabulary().tokenizer.decode_bytes(list(tokens))) :]
        tokens += tuple(vocabulary().tokenizer.tokenize_bytes(rest)[:1])
    assert set(tokens_of(follower.after(tokens).legal)) <= {0, 2}, "nothing but the end may follow"
    assert vocabulary().tokenizer.decode_str(list(tokens)) == text
    assert min(tokens) > 16, "no special token"


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
    monkeypatch.setattr(limits, "STATES", 100)
    (text,) = strings(1, 2000)
    follower = matcher(make(text))
    begun = follower.after(()).forced
    begun += tuple(vocabulary().tokenizer.tokenize_str("A"))
    position = follower.after(begun)
    assert position.complete
    assert text in vocabulary().tokenizer.decode_str(list(begun + position.forced))


@pytest.mark.anyio
async def test_a_client_keeps_its_turn_until_its_compilation_ends() -> None:
    """Or it would leave again and again, and have all threads."""
    compiler, run = Compiler(words), threading.Event()
    blocked = asyncio.create_task(compiler.begun(lambda: (run.wait() and GRAMMARS["choice"]) or "", "hers"))
    await asyncio.sleep(0)
    blocked.cancel()
    again = asyncio.create_task(compiler.begun(lambda: GRAMMARS["choice"], "hers"))
    assert (await compiler.begun(lambda: GRAMMARS["regex"], "his")).start.end
    assert not blocked.done()
    assert not again.done()
    run.set()
    assert (await again).start.end
    assert blocked.cancelled()


def test_a_tokenizer_that_the_engine_cannot_read_is_named() -> None:
    with pytest.raises(StructureError, match="no token that ends"):
        Vocabulary.of(bytewise(), ())

    class Broken:
        def to_str(self) -> str:
            return "{}"

    unreadable: Any = Broken()
    with pytest.raises(StructureError, match="tokenizer"):
        Vocabulary.of(unreadable, {0})
