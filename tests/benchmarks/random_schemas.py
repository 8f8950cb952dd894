"""Counts what is wrong with answers over random JSON Schemas: `python -m tests.benchmarks.random_schemas --json`.

No model and no data are needed. Each number makes a schema (`tests.services.structure.random_schemas`), of which one
text is drawn, and one answer that is ended before its tokens are used up. The counts are those of
`tests.benchmarks.schemas`, and:

- `wrongly_empty`: schemas that were refused because they admit no value, although one of some simple values is one.
- `cpu_s`: seconds of a processor.

`examples` names the numbers of schemas with something wrong. `--kept FILE` adds a line to a file for each thousand
schemas, and goes on after those that it has, so that a run can be interrupted.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from privmix.structure import grammar
from privmix.structure.errors import StructureError
from privmix_cluster.options import JsonOption
from tests.benchmarks import schemas as benchmark
from tests.benchmarks.options import show
from tests.services.structure.random_schemas import NAMES, random_schema

PIECE = 1000
TOKENS = 120
"""Of the longest text that is followed to its end."""
EMPTY = ("the schema admits no value", "the schema admits no finite value")
"""The reasons of a schema without a value. A complement that was narrowed is said to be the reason, perhaps."""

SCALARS: list[Any] = [
    None,
    True,
    False,
    *(-7, -1.5, -1, 0, 0.25, 0.5, 1, 2, 2.5, 3, 5, 10, 99),
    *("", "a", "ab", "b", "abc", "1a", 'q"'),
]
INNER: list[Any] = [*SCALARS, [], {}]
VALUES: list[Any] = [*INNER, "2024-01-01", "1.2.3.4", [{}], [1, "a"], [2, 3], [0, 1, 2]]
VALUES += [*([value] for value in INNER), *({name: value} for name in NAMES for value in INNER)]


def main(
    first: Annotated[int, typer.Option(min=0, help="The number of the first schema.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Of schemas.")] = 100_000,
    kept: Annotated[Path | None, typer.Option(help="A file of pieces, with which it goes on.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Ten schemas.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Count invalid texts, dead ends and answers that are left broken."""
    numbers = range(first, first + (10 if quick else count))
    found: Counter[str] = Counter()
    examples: list[str] = []
    for piece in pieces(numbers, kept):
        found.update(piece["counts"])
        examples += piece["examples"]
    names = (*benchmark.COUNTS, "wrongly_empty", "cpu_s")
    measured = {"first": numbers.start, **{name: found[name] for name in names}, "examples": examples}
    show(measured, as_json)


def pieces(numbers: range, kept: Path | None) -> Iterator[dict[str, Any]]:
    """Yields the counts and examples of each `PIECE` schemas; those that a file has are not counted again."""
    known: dict[str, dict[str, Any]] = {}
    if kept is not None and kept.exists():
        known = {piece["numbers"]: piece for piece in map(json.loads, kept.read_text().splitlines())}
    for begin in range(numbers.start, numbers.stop, PIECE):
        these = range(begin, min(begin + PIECE, numbers.stop))
        name = f"{these.start}-{these.stop - 1}"
        if name not in known:
            began = time.process_time()
            side = counted(these)
            counts = {**side.counts, "cpu_s": round(time.process_time() - began)}
            known[name] = {"numbers": name, "counts": counts, "examples": side.examples}
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(known[name], ensure_ascii=False) + "\n")
        yield known[name]


def counted(numbers: range) -> benchmark.Side:
    """Returns the counts over the schemas of these numbers."""
    side = benchmark.Side()
    for number in numbers:
        chance = random.Random(number)
        schema = random_schema(chance)
        case = benchmark.SchemaCase(str(number), schema, [])
        benchmark.measure(case, grammar.of_json_schema, side, 1, TOKENS, chance, ends=True)
        if case.name in side.refused and is_empty(schema) and (wrong := value_of(schema)) is not None:
            side.count(case, "wrongly_empty", wrong)
    return side


def is_empty(schema: Any) -> bool:
    """Tells whether a schema is refused because it admits no value."""
    try:
        grammar.of_json_schema(schema)
    except StructureError as error:
        return str(error) in EMPTY
    return False


def value_of(schema: Any) -> str | None:
    """Returns the text of a simple value that a schema admits, or None."""
    for text in map(json.dumps, VALUES):
        verdict = benchmark.is_valid(schema, text)
        if verdict is None:  # its references go in a circle, which takes the judge long to find for each value
            return None
        if verdict:
            return text
    return None


if __name__ == "__main__":
    typer.run(main)
