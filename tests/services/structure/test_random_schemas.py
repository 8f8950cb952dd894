"""Claim: no text of any schema is invalid or cannot be finished, and a schema that is refused as empty is empty.

The judge is the `jsonschema` package, which shares no code with ours.
"""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from services.structure import grammar
from services.structure.errors import StructureError
from tests.benchmarks import schemas as benchmark
from tests.services.structure.random_schemas import NAMES, random_schema

SCALARS: list[Any] = [
    None,
    True,
    False,
    -7,
    -1.5,
    -1,
    0,
    0.25,
    0.5,
    1,
    2,
    2.5,
    3,
    5,
    10,
    99,
    "",
    "a",
    "ab",
    "b",
    "abc",
    "1a",
    'q"',
]
VALUES: list[Any] = [*SCALARS, "2024-01-01", "1.2.3.4", [], {}, [{}], [1, "a"], [2, 3], [0, 1, 2]]
INNER: list[Any] = [*SCALARS, [], {}]
VALUES += [*([value] for value in INNER), *({name: value} for name in NAMES for value in INNER)]


def sides(seeds: range) -> benchmark.Side:
    """Returns the counts over random schemas, and checks those that were refused as empty."""
    side = benchmark.Side()
    for seed in seeds:
        chance = random.Random(seed)
        schema = random_schema(chance)
        benchmark.measure(benchmark.SchemaCase(str(seed), schema, []), grammar.of_json_schema, side, 1, 120, chance)
        if refused_as_empty(schema):
            assert [value for value in VALUES if benchmark.is_valid(schema, json.dumps(value))] == [], seed
    return side


def refused_as_empty(schema: Any) -> bool:
    try:
        grammar.of_json_schema(schema)
    except StructureError as error:
        # A complement that was narrowed is said to be the reason, perhaps.
        return str(error) in ("the schema admits no value", "the schema admits no finite value")
    return False


def check(side: benchmark.Side) -> None:
    assert side.counts["texts"] > side.counts["schemas"] / 2
    assert side.examples == []
    assert side.counts["invalid_texts"] == side.counts["dead_ends"] == 0


def test_random_schemas() -> None:
    check(sides(range(12)))


@pytest.mark.slow
def test_a_thousand_random_schemas() -> None:
    check(sides(range(1000)))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_hundred_thousand_random_schemas() -> None:
    check(sides(range(1000, 101_000)))


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


@pytest.mark.slow
def test_our_own_schemas() -> None:
    side = benchmark.Side()
    for case in benchmark.cases(benchmark.OWN):
        benchmark.measure(case, grammar.of_json_schema, side, 3, 300, random.Random(case.name))
    assert side.counts["schemas"] >= 60
    assert side.examples == []
    assert side.counts["refused"] == 0
