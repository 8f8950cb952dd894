"""Claim: a structured answer that is accepted ends well, however few tokens it has and whatever is sampled."""

import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from privmix.coordinator.messages import Delta, Generation
from privmix.coordinator.sequence import LiveSequence
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.structure import grammar
from privmix.structure.compiler import begun
from privmix.structure.errors import StructureError
from tests.services.structure.judge import is_valid
from tests.services.structure.random_schemas import random_schema
from tests.support.structure import TICKET, tokens_of, vocabulary
from tests.support.texts import smollm

ROOM = (0, 0, 0, 1, 1, 2, 3, 5, 9, 20)
"""The tokens that an answer has beside those of the shortest one."""
FEW = 20


def sampled(live: LiveSequence, chance: random.Random) -> int:
    """Samples as a model that likes long tokens, or any."""
    legal = tokens_of(live.options.legal or b"")
    some = chance.sample(legal, min(len(legal), FEW))
    decode = vocabulary().tokenizer.decode_bytes
    return chance.choice(some) if chance.random() < 0.5 else max(some, key=lambda token: len(decode([token])))


def answered(generation: Generation, text: str, chance: random.Random) -> list[Delta]:
    """Returns the deltas of an answer whose tokens are charged and sampled as the coordinator does it."""
    live = LiveSequence("channel", generation, smollm(), begun(text, vocabulary())[0])
    first = live.begin(live.position())
    deltas = [] if first is None else [first]
    while live.finish_reason is None:
        live.charge()
        token = sampled(live, chance)
        deltas.append(live.accept(token, live.position(token)))
    steps = len(deltas) - (first is not None)
    assert sum(delta.charged for delta in deltas) == steps, "each sampled token is charged once, and nothing else is"
    return deltas


def check(seed: int, ends: Counter[str]) -> None:
    """Answers a random schema with little more room than its shortest answer needs. Counts how answers end."""
    chance = random.Random(seed)
    schema = random_schema(chance)
    try:
        text = grammar.of_json_schema(schema)
        _, start = begun(text, vocabulary())
    except StructureError:
        ends["refused"] += 1
        return
    assert start.shortest is not None
    limit = start.shortest + chance.choice(ROOM)
    generation = Generation(str(seed), (1,), SamplingOptions(), limit, grammar=text)
    deltas = answered(generation, text, chance)
    whole = "".join(delta.text for delta in deltas)
    last = deltas[-1]
    assert (last.finish_reason, last.complete) in {("stop", False), ("length", True)}, json.dumps(schema)
    assert sum(delta.tokens for delta in deltas) <= limit, json.dumps(schema)
    _check_value(whole, schema)
    ends[str(last.finish_reason)] += 1
    ends["left out"] += last.lost


def _check_value(text: str, schema: dict[str, Any]) -> None:
    assert is_valid(schema, text), f"{text!r} is no value of {json.dumps(schema)}"


def test_every_answer_that_is_accepted_ends_well() -> None:
    ends: Counter[str] = Counter()
    for seed in range(80):
        check(seed, ends)
    assert min(ends["stop"], ends["length"], ends["left out"]) > 0, "each way to end occurs"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(1, 11))
def test_a_thousand_schemas(block: int) -> None:
    ends: Counter[str] = Counter()
    for seed in range(block * 100, (block + 1) * 100):
        check(seed, ends)
    assert ends["stop"] + ends["length"] >= 40


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_that_another_coordinator_continues_ends_well(seed: int) -> None:
    """The other one has the tokens of the deltas alone. It finds the same end, so that one fits."""
    chance = random.Random(seed)
    schema = {"type": "array", "items": {"type": "array", "items": TICKET["properties"]["reason"]}, "minItems": 2}
    text = grammar.of_json_schema(schema)
    matcher, start = begun(text, vocabulary())
    assert start.shortest is not None
    generation = Generation("g", (1,), SamplingOptions(), start.shortest + 12, grammar=text)
    live = LiveSequence("channel", generation, smollm(), matcher)
    released: list[int] = []
    first = live.begin(live.position())
    deltas = [] if first is None else [first]
    ends = []
    while live.finish_reason is None:
        live.charge()
        token = sampled(live, chance)
        deltas.append(live.accept(token, live.position(token)))
        released += deltas[-1].token_ids
        ends.append((tuple(released), live._end))
    for before, end in ends[:-1]:
        other = LiveSequence("channel", replace(generation, released=before), smollm(), begun(text, vocabulary())[0])
        other.begin(other.position())
        assert other._end == end
        while other.finish_reason is None:
            other.charge()
            token = sampled(other, chance)
            other.accept(token, other.position(token))
        _check_value(vocabulary().tokenizer.decode_str([t for t in other.tokens[1:] if t not in (0, 2)]), schema)
