"""Claim: after every text that a grammar admits so far, something may follow, or the text is complete.

The search tries all bytes of an alphabet after each text, in depth and by chance, up to a number of texts.
"""

import random
from collections.abc import Iterable

import numpy as np
import pytest
from llguidance import LLMatcher

from privmix.structure import compiler, grammar
from privmix.structure.compiler import limits_of
from privmix.structure.errors import StructureError
from privmix.structure.vocabulary import BYTES
from tests.benchmarks import schemas as benchmark
from tests.services.structure.random_schemas import random_schema
from tests.support.structure import GRAMMARS

LONGEST = 120
"""The bytes of the longest text."""


def stuck(text: str, texts: int, chance: random.Random) -> tuple[bytes | None, int]:
    """Searches a text after which nothing may follow although it is not complete. Returns the number of texts, too."""
    engine = LLMatcher(BYTES.tokenizer, text, log_level=0, limits=limits_of(text))
    path: list[int] = []
    left: list[list[int]] = []
    visited = 0
    while visited < texts:
        visited += 1
        mask = b"" if engine.is_stopped() else engine.compute_bitmask()
        legal = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:256]).tolist()
        if engine.is_error() or not (legal or engine.is_accepting()):
            return bytes(path), visited
        left.append(chance.sample(legal, min(len(legal), 3)) if len(path) < LONGEST else [])
        while left and not left[-1]:
            left.pop()
            if path and left:
                engine.rollback(1)
                path.pop()
        if not left:
            break
        byte = left[-1].pop()
        assert engine.consume_token(byte), (bytes(path), byte)
        path.append(byte)
    return None, visited


def check(grammars: Iterable[str], texts: int) -> None:
    searched = 0
    for number, text in enumerate(grammars):
        found, visited = stuck(text, texts, random.Random(number))
        assert found is None, text
        searched += visited
    assert searched > texts, "a grammar has more texts than one"


def random_grammars(seeds: range) -> Iterable[str]:
    for seed in seeds:
        try:
            yield grammar.of_json_schema(random_schema(random.Random(seed)))
        except StructureError:
            continue


@pytest.mark.parametrize("kind", GRAMMARS)
def test_something_follows_each_text(kind: str) -> None:
    assert stuck(GRAMMARS[kind], 300, random.Random(1))[0] is None


def test_an_array_of_different_items_is_begun_only_if_there_are_enough() -> None:
    few = {"type": "array", "items": {"const": 1}, "uniqueItems": True, "minItems": 2}
    assert stuck(grammar.of_json_schema({"anyOf": [few, {"const": [2]}]}), 50, random.Random(0)) == (None, 4)
    with pytest.raises(StructureError, match="no finite value"):
        grammar.of_json_schema(few)


def test_something_follows_each_text_of_some_schemas() -> None:
    check(random_grammars(range(20)), 100)


@pytest.mark.slow
def test_something_follows_each_text_of_a_thousand_schemas() -> None:
    check(random_grammars(range(1000)), 500)
    check((grammar.of_json_schema(case.schema) for case in benchmark.cases(benchmark.OWN)), 3000)


def test_the_search_finds_a_dead_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "STATES", 20)
    found, _ = stuck(grammar.of_regex("[ab]*a[ab]{9}c"), 300, random.Random(1))
    assert found, "the engine reaches its limit"
