"""Claim: a record of the demo corpus costs fewer tokens than the dialogue that says the same; most are free."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from privmix.structure import grammar
from privmix.structure.matcher import Matcher
from privmix.training import demo
from privmix.training.demo import TRAIN, write_demo_corpus
from tests.support.structure import matcher, vocabulary

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "caller": {"type": "string", "maxLength": 40},
        "reason": {"enum": list(demo.REASONS)},
        "detail": {"type": "string", "maxLength": 80},
        "doctor": {"enum": list(demo._DOCTORS)},
        "day": {"enum": list(demo._DAYS)},
        "time": {"enum": list(demo._TIMES)},
    },
    "required": ["caller", "reason", "detail", "doctor", "day", "time"],
    "additionalProperties": False,
}
DIALOGUE = re.compile(
    r"Caller: This is (?P<caller>.+), insurance number HC-\d+\. (?P<reason>.+?)\. (?P<detail>.+)\.\n"
    r".*(?P<doctor>Dr\. \w+).* on (?P<day>\w+) at (?P<time>[\d:]+)\."
)


def free_tokens(follower: Matcher, text: str) -> tuple[int, int]:
    """Returns the numbers of free and of charged tokens of a text."""
    tokens: tuple[int, ...] = ()
    free = 0
    while True:
        position = follower.after(tokens)
        tokens, free = tokens + position.forced, free + len(position.forced)
        if position.complete:
            return free, len(tokens) - free
        rest = text.encode()[len(vocabulary().tokenizer.decode_bytes(list(tokens))) :]
        tokens = (*tokens, vocabulary().tokenizer.tokenize_bytes(rest)[0])


def test_a_record_of_the_demo_corpus_costs_less_than_its_dialogue(tmp_path: Path) -> None:
    write_demo_corpus(tmp_path, users=9, held_out=1)
    follower = matcher(grammar.of_json_schema(SCHEMA))
    plain = free = charged = 0
    for line in (tmp_path / TRAIN).read_text().splitlines():
        text = json.loads(line)["text"]
        found = DIALOGUE.fullmatch(text)
        assert found
        record = {name: found[name] for name in SCHEMA["properties"]}
        counts = free_tokens(follower, json.dumps(record))
        free, charged = free + counts[0], charged + counts[1]
        plain += len(vocabulary().tokenizer.tokenize_str(text))
    assert free / (free + charged) == pytest.approx(0.65, abs=0.05)
    assert charged < plain / 2
