"""Bounds what a structure may ask of the grammar engine, which is fast on everything below these limits.

The engine stops itself at most other bombs (`engine_limits`). Not at these: an array of a million items takes 15 s and
1.1 GB, 5,000 properties 4 s, steps of `multipleOf` of a million 11 s and 360 MB.
"""

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, NoReturn

from llguidance import LLParserLimits

from privmix.structure.errors import StructureError

MAX_BYTES = 96 * 1024
MAX_DEPTH = 32
MAX_CHOICES = 5000
"""The maximum number of values of all enumerations of a schema together, and of the strings of a choice."""
MAX_COUNT = 4096
"""The maximum sum of the numbers of items and properties that a schema gives as limits."""
MAX_PROPERTIES = 1000
"""The maximum number of properties that a schema names."""
MAX_PATTERNS = 64
"""The maximum number of `patternProperties`, each pair of which is compared."""
MAX_LENGTH = 1_000_000
"""The greatest limit of a string's length."""
MAX_REPEATS = 10_000
"""The greatest number of repetitions in a regular expression."""
MAX_STEPS = 50_000
"""The maximum sum of the steps of `multipleOf`, each without its decimal point: a remainder is a state."""
STATES = 20_000
"""The states of a lexer beside those of the grammar's own text."""

CHOICE = "choice"
"""The name of the grammar of a choice."""
VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values hold no schemas."""
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
_LENGTHS = ("minLength", "maxLength")
_REPEATS = re.compile(r"(?<!\\[xuUpP])\{(\d*),?(\d*)\}")


def engine_limits(grammar: str) -> LLParserLimits:
    """Returns the limits of an engine.

    A lexer state takes one to two kilobytes, a step about a millisecond for each 14,000 units of fuel. A literal has a
    state for each byte, so each literal that fits a grammar can be followed to its end. A choice is one terminal, each
    of whose states may hold all of its strings: none of them can fail after it was begun.
    """
    is_choice = any(part.get("name") == CHOICE for part in json.loads(grammar)["grammars"])
    return LLParserLimits(
        max_items_in_row=10_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=4_000_000 if is_choice else 200_000,
        step_max_items=50_000,
        max_lexer_states=STATES + len(grammar.encode()),
        max_grammar_size=50_000,
        verbose_errors=False,
    )


def check_size(text: str) -> None:
    """Checks the size of a regular expression, the strings of a choice or a schema in UTF-8.

    Raises:
        StructureError: it has more than `MAX_BYTES` bytes, or it contains half of a surrogate pair.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise StructureError("a string contains a lone surrogate, which is no character") from None
    if size > MAX_BYTES:
        raise StructureError(f"it has {size} bytes; give at most {MAX_BYTES}")


def check_pattern(pattern: str) -> None:
    """Checks the repetitions of a regular expression.

    Raises:
        StructureError: one of them is of more than `MAX_REPEATS`.
    """
    if any(len(count) > 9 or int(count or 0) > MAX_REPEATS for pair in _REPEATS.findall(pattern) for count in pair):
        _refuse("a regular expression", MAX_REPEATS, "repetitions")


def check_schema(schema: Any) -> None:
    """Checks that a JSON Schema is small.

    Raises:
        StructureError: it exceeds a limit of this module, which the message names.
    """
    counts = choices = properties = patterns = 0
    steps = Decimal(0)
    for node in nodes(schema):
        counts += sum(_count(node, name, MAX_COUNT) for name in _COUNTS)
        for name in _LENGTHS:
            _count(node, name, MAX_LENGTH)
        choices += len(node["enum"]) if isinstance(node.get("enum"), list) else 0
        properties += len(node["properties"]) if isinstance(node.get("properties"), dict) else 0
        keyed = node["patternProperties"] if isinstance(node.get("patternProperties"), dict) else {}
        patterns += len(keyed)
        for pattern in (*keyed, node.get("pattern")):
            if isinstance(pattern, str):
                check_pattern(pattern)
        steps += _step(node.get("multipleOf"))
    for sum_, most, what in (
        (counts, MAX_COUNT, "as limits of items and properties together (such as maxItems)"),
        (choices, MAX_CHOICES, "values of its enumerations"),
        (properties, MAX_PROPERTIES, "properties"),
        (patterns, MAX_PATTERNS, "patternProperties"),
        (steps, MAX_STEPS, "as the steps of multipleOf together"),
    ):
        if sum_ > most:
            _refuse("the schema", most, what)


def _count(node: Mapping[str, Any], name: str, most: int) -> int:
    """Returns a limit of a schema; 0 if it gives none. What is no whole number is the engine's to refuse."""
    value = node.get(name)
    if not isinstance(value, int | float):
        return 0
    if value > most:
        _refuse(name, most, "or leave it out")
    return int(max(value, 0)) if value == value else 0


def _step(value: object) -> Decimal:
    """Returns a step of `multipleOf` without its decimal point."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return Decimal(0)
    step = Decimal(str(value)).normalize() if len(str(value)) < 40 else Decimal(MAX_STEPS + 1)
    exponent = step.as_tuple().exponent
    return step.scaleb(-exponent) if isinstance(exponent, int) and exponent < 0 else step


def _refuse(field: str, most: int, what: str) -> NoReturn:
    raise StructureError(f"{field}: give at most {most} {what}")


def nodes(root: object) -> Iterator[Mapping[str, Any]]:
    """Yields the objects of a JSON Schema that are no values, without recursion."""
    waiting = [(root, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise StructureError(f"the schema is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, dict):
            yield value
            waiting.extend((child, depth + 1) for name, child in value.items() if name not in VALUES)
        elif isinstance(value, list):
            waiting.extend((child, depth + 1) for child in value)
