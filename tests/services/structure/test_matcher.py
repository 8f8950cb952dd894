"""Claim: the legal tokens lead to texts of the grammar, forced tokens have no alternative, and tokens decide alone."""

import asyncio
import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from transformers import AutoTokenizer

from services.structure import grammar
from services.structure.compiler import LIMITS, Compiler
from services.structure.errors import StructureError
from services.structure.matcher import Matcher
from services.structure.vocabulary import Vocabulary
from services.training.public_model import resolve

TICKET: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "reason": {"enum": ["a sore throat", "a flu shot", "a prescription"]},
        "urgent": {"type": "boolean"},
        "visits": {"type": "array", "items": {"$ref": "#/$defs/visit"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "reason", "urgent", "visits"],
    "additionalProperties": False,
    "$defs": {
        "visit": {
            "type": "object",
            "properties": {"year": {"type": "integer", "minimum": 1990, "maximum": 2030}},
            "required": ["year"],
            "additionalProperties": False,
        }
    },
}
GRAMMARS = {
    "schema": grammar.of_json_schema(TICKET),
    "constant": grammar.of_json_schema({"const": {"a": [1, None, "é"]}}),
    "choice": grammar.of_choice(["yes", "yesterday", "no"]),
    "regex": grammar.of_regex("[A-Z][a-z]{2,5} [0-9]{3}-[0-9]{4}"),
    "lark": grammar.of_grammar('start: "(" start ")" | "x"'),
    "gbnf": grammar.of_grammar('root ::= "yes, " name | "no"\nname ::= [a-c]+ "."'),
    "tools": grammar.of_tool_call({"find": TICKET, "end": {"type": "object", "additionalProperties": False}}),
}


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.of(AutoTokenizer.from_pretrained(resolve()).backend_tokenizer, {0, 2})


def matcher(text: str) -> Matcher:
    return asyncio.run(Compiler(vocabulary).matcher(text))


def tokens_of(legal: bytes) -> list[int]:
    bits = int.from_bytes(legal, "little")
    return [token for token in range(bits.bit_length()) if bits >> token & 1]


def walk(follower: Matcher, seed: int, longest: int = 150) -> tuple[int, ...]:
    """Returns the tokens of a text that chooses uniformly among short legal tokens, so that it ends soon."""
    generator = random.Random(seed)
    text: tuple[int, ...] = ()
    while len(text) < longest:
        position = follower.after(text)
        text += position.forced
        if position.complete:
            return text
        text += (generator.choice(_likely(tokens_of(position.legal))),)
    pytest.fail("the text does not end")


def _likely(legal: list[int]) -> list[int]:
    """Returns the tokens that close a string or a list, if there are any, and some others."""
    decode = vocabulary().tokenizer.decode_str
    return [token for token in legal if re.fullmatch(r'[a-z]?["}\])0-9.,]*', decode([token]))] or legal


def text_of(tokens: tuple[int, ...]) -> str:
    return vocabulary().tokenizer.decode_str([token for token in tokens if token not in (0, 2)])


@pytest.mark.parametrize("seed", range(10))
def test_every_walk_through_a_schema_is_a_value_of_it(seed: int) -> None:
    value = json.loads(text_of(walk(matcher(GRAMMARS["schema"]), seed)))
    jsonschema.validate(value, TICKET)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("constant", re.escape('{"a": [1, null, "é"]}')),
        ("choice", "yes|yesterday|no"),
        ("regex", "[A-Z][a-z]{2,5} [0-9]{3}-[0-9]{4}"),
        ("lark", r"\(*x\)*"),
        ("gbnf", r"yes, [a-c]+\.|no"),
        ("tools", r'\{"name": "(find|end)", "arguments": \{.*\}\}'),
    ],
)
def test_every_walk_through_a_grammar_matches_it(kind: str, pattern: str, seed: int) -> None:
    text = text_of(walk(matcher(GRAMMARS[kind]), seed))
    assert re.fullmatch(pattern, text)
    if kind == "lark":
        assert text.count("(") == text.count(")")


@pytest.mark.parametrize("kind", GRAMMARS)
def test_each_forced_token_is_the_only_legal_one(kind: str) -> None:
    """Compares the runs with the legal tokens that the engine computes one token at a time."""
    for seed in range(3):
        text = walk(matcher(GRAMMARS[kind]), seed)
        follower = matcher(GRAMMARS[kind])
        single = LLMatcher(vocabulary().tokenizer, GRAMMARS[kind], log_level=0, limits=LIMITS)
        forced: set[int] = set()
        at = 0
        while at < len(text):
            position = follower.after(text[:at])
            forced |= set(range(at, at + len(position.forced)))
            at += len(position.forced) + 1
        for index, token in enumerate(text):
            legal = tokens_of(single.compute_bitmask())
            assert token in legal
            assert (legal == [token]) == (index in forced)
            single.consume_token(token)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_position_depends_on_the_tokens_alone(kind: str) -> None:
    """A matcher that starts anywhere, even within a forced run, continues as one that followed the whole text."""
    text = walk(matcher(GRAMMARS[kind]), 1)
    whole = matcher(GRAMMARS[kind])
    for length in range(len(text) + 1):
        assert matcher(GRAMMARS[kind]).after(text[:length]) == whole.after(text[:length])
    assert whole.after(()) == matcher(GRAMMARS[kind]).after(()), "an earlier text starts again"


def test_a_limit_cuts_a_forced_run() -> None:
    follower = matcher(GRAMMARS["constant"])
    whole = follower.after(()).forced
    for limit in range(len(whole) + 1):
        position = follower.after((), limit)
        assert position.forced == whole[:limit]
        assert position.complete == (limit == len(whole))


def test_an_end_token_completes_a_text_that_could_go_on() -> None:
    follower = matcher(grammar.of_regex("a+"))
    assert {0, 2} & set(tokens_of(follower.after(tuple(vocabulary().tokenizer.tokenize_str("aa"))).legal))
    assert follower.after((*vocabulary().tokenizer.tokenize_str("aa"), 2)).complete


def test_a_text_outside_the_grammar_is_refused_and_the_next_one_starts_again() -> None:
    follower = matcher(GRAMMARS["choice"])
    with pytest.raises(StructureError):
        follower.after(tuple(vocabulary().tokenizer.tokenize_str("maybe")))
    assert follower.after(()).legal
