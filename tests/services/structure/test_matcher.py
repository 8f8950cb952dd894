"""Claim: the legal tokens lead to texts of the grammar, forced tokens have no alternative, and tokens decide alone."""

import json
import random
import re
from collections.abc import Collection
from typing import Any

import pytest

from privmix.structure import grammar, limits
from privmix.structure.compiler import compiled
from privmix.structure.errors import StructureError
from privmix.structure.matcher import Matcher
from tests.support.structure import GRAMMARS, matcher, tokens_of, vocabulary


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


@pytest.mark.parametrize("kind", GRAMMARS)
def test_each_forced_token_is_the_only_legal_one(kind: str) -> None:
    """Compares the runs with the legal tokens that the engine computes one token at a time."""
    for seed in range(3):
        text = walk(matcher(GRAMMARS[kind]), seed)
        follower = matcher(GRAMMARS[kind])
        single = compiled(GRAMMARS[kind], vocabulary())
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


LONG: dict[str, Any] = {
    "type": "object",
    "properties": {f"field {length}": {"type": "string", "maxLength": length} for length in range(300, 2000, 240)},
    "additionalProperties": False,
}
LONG["required"] = list(LONG["properties"])


def long_text(fields: Collection[int] = range(len(LONG["properties"]))) -> tuple[int, ...]:
    """Returns a value of `LONG`. The strings with these numbers are as long as they may be, the others are empty."""
    words = "the quick brown fox 123 jumps " * 70
    schemas = enumerate(LONG["properties"].items())
    value = {name: words[: schema["maxLength"] * (number in fields)] for number, (name, schema) in schemas}
    return tuple(vocabulary().tokenizer.tokenize_str(json.dumps(value)))


def test_a_schema_serves_any_number_of_answers() -> None:
    """Copies of one engine share its lexer, so one of these answers failed, and each one after it."""
    answers = 3 * len(LONG["properties"])
    for number in range(answers):
        follower = matcher(grammar.of_json_schema(LONG))
        text = long_text({number % len(LONG["properties"])})
        positions = [follower.after(text[:length]) for length in range(len(text) + 1)]
        assert positions[-1].complete, number


def test_an_answer_tells_nothing_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer exhausts its engine; a client would learn from the others which token the first had."""
    secret = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz0123456789 ", k=4000))
    monkeypatch.setattr(limits, "STATES", -1000)
    first, second = [vocabulary().tokenizer.tokenize_str(letter)[0] for letter in "AB"]
    exhausted, other = [matcher(grammar.of_regex(f"A{secret}|B")) for _ in range(2)]
    with pytest.raises(StructureError):
        exhausted.after((first,))
    assert other.after((second,)).complete
    with pytest.raises(StructureError):
        other.after((first,))
    assert other.after((second,)).complete, "nor of a token that was taken back"


def test_a_long_answer_continues_anywhere_as_if_it_had_never_been_interrupted() -> None:
    """Its masks need more states than an engine may have, so it uses several engines one after another."""
    text = long_text()
    assert len(text) > 2000
    whole = matcher(grammar.of_json_schema(LONG))
    positions = [whole.after(text[:length]) for length in range(len(text) + 1)]
    assert positions[-1].complete
    for length in (0, 1, 1200, 1300, 1400, 2000, len(text)):
        follower = matcher(grammar.of_json_schema(LONG))
        assert [follower.after(text[:at]) for at in range(length, min(length + 3, len(text)) + 1)] == (
            positions[length : min(length + 3, len(text)) + 1]
        )
