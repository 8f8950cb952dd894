"""Claim: no text of any schema is invalid or cannot be finished, and a schema that is refused as empty is empty.

The judge is the `jsonschema` package, which shares no code with ours.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privmix.structure import grammar
from privmix.structure.matcher import Position
from tests.benchmarks import random_schemas
from tests.benchmarks import schemas as benchmark
from tests.support.structure import vocabulary


def check(numbers: range) -> None:
    side = random_schemas.counted(numbers)
    assert side.counts["texts"] > side.counts["schemas"] / 2
    assert side.counts["answers"] == side.counts["texts"]
    assert side.examples == []
    assert side.counts["invalid_texts"] == side.counts["dead_ends"] == side.counts["left_broken"] == 0


def test_random_schemas() -> None:
    check(range(12))


@pytest.mark.slow
def test_a_thousand_random_schemas() -> None:
    check(range(1000))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("thousand", range(1, 101))
def test_a_hundred_thousand_random_schemas(thousand: int) -> None:
    check(range(1000 * thousand, 1000 * (thousand + 1)))


@pytest.mark.parametrize(
    "fault", [lambda: json.dumps({"grammars": [{"lark_grammar": 'start: "1e999"'}]}), lambda: grammar.of_choice(["2"])]
)
def test_the_count_finds_invalid_texts(fault: Callable[[], str]) -> None:
    side = benchmark.Side()
    case = benchmark.SchemaCase("planted", {"type": "number", "maximum": 1}, [(2, False)])
    benchmark.measure(case, lambda _: fault(), side, 1, 10, random.Random(0))
    assert side.counts["invalid_texts"] >= 1


def test_the_count_finds_dead_ends_and_lost_instances() -> None:
    side = benchmark.Side()
    case = benchmark.SchemaCase("planted", {"type": "array"}, [([], True), ([1], True)])
    benchmark.measure(case, lambda _: grammar.of_choice(["[]"]), side, 0, 10, random.Random(0))
    assert (side.counts["valid"], side.counts["not_admitted"]) == (2, 1)

    class Stuck:
        def is_stopped(self) -> bool:
            return False

        is_accepting = is_error = is_stopped

        def compute_bitmask(self) -> bytes:
            return b"\0"

    drawn: Any = Stuck()
    assert benchmark.draw(drawn, 5, random.Random(0), []) == ("", False)


class Following:
    """Returns positions, of which the first are fixed, whatever the text is."""

    def __init__(self, *positions: Position) -> None:
        self._positions = [*positions]

    def after(self, _: object, __: int | None = None) -> Position:
        return self._positions.pop(0) if len(self._positions) > 1 else self._positions[0]


@pytest.mark.parametrize(("end", "expected"), [("]", True), ("}", False), (None, False)])
def test_the_count_finds_answers_that_are_left_broken(end: str | None, expected: bool) -> None:
    tokenizer = vocabulary().tokenizer
    (begin,) = tokenizer.tokenize_str("[")
    last = None if end is None else tuple(tokenizer.tokenize_str(end))
    follower: Any = Following(Position((begin,), bytes([1] * 10), last))
    text = benchmark.answer(follower, random.Random(0), spare=0)
    assert (text is not None and benchmark.is_valid({"type": "array"}, text)) is expected


def test_a_count_goes_on_after_the_pieces_that_a_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_schemas, "PIECE", 2)
    kept = tmp_path / "pieces"
    whole = list(random_schemas.pieces(range(3), kept))
    assert [piece["counts"]["schemas"] for piece in whole] == [2, 1]
    monkeypatch.setattr(random_schemas, "counted", lambda numbers: pytest.fail(f"{numbers} are counted again"))
    assert list(random_schemas.pieces(range(3), kept)) == whole


@pytest.mark.slow
def test_our_own_schemas() -> None:
    side = benchmark.Side()
    for case in benchmark.cases(benchmark.OWN):
        benchmark.measure(case, grammar.of_json_schema, side, 3, 300, random.Random(case.name))
    assert side.counts["schemas"] >= 60
    assert side.examples == []
    assert side.counts["refused"] == 0
