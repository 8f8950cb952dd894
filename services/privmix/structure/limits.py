"""Bounds the size of structures before they are compiled."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from privmix.structure.errors import StructureError

MAX_BYTES = 96 * 1024
MAX_DEPTH = 32
MAX_NODES = 2000
MAX_REFERENCES = 256
"""The maximum number of different references in a schema."""
MAX_CHOICES = 5000
"""The maximum number of values of all enumerations of a schema together, and of the strings of a choice."""
MAX_COUNT = 4096
"""The maximum sum of the numbers of items and properties that a schema gives as limits: each item takes memory."""
MAX_LENGTH = 1_000_000
"""The largest minimum of a string's length. An answer that must be longer never ends."""
UNREACHABLE = 2**31 - 1
"""A maximum that is at least this large limits nothing: no answer has as many bytes."""

_LEAST = ("minItems", "minProperties", "minContains", "minLength")
_MOST = ("maxItems", "maxProperties", "maxContains", "maxLength")
_LENGTHS = ("minLength", "maxLength")
_VALUES = ("const", "enum", "default", "examples")


def check_size(text: str) -> None:
    """Checks the size of a grammar, a regular expression or a schema in UTF-8.

    Raises:
        StructureError: it has more than `MAX_BYTES` bytes, or it contains half of a surrogate pair.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise StructureError("a string contains a lone surrogate, which is no character") from None
    if size > MAX_BYTES:
        raise StructureError(f"it has {size} bytes; give at most {MAX_BYTES}")


def check_schema(schema: object) -> None:
    """Checks that a JSON Schema is small. A node is an object or an array.

    Raises:
        StructureError: it exceeds `MAX_DEPTH`, `MAX_NODES`, `MAX_REFERENCES`, `MAX_CHOICES`, `MAX_COUNT` or
            `MAX_LENGTH`.
    """
    choices = items = 0
    references: set[str] = set()
    for number, (node, depth, is_schema) in enumerate(_nodes(schema), 1):
        if depth > MAX_DEPTH:
            raise StructureError(f"it is nested more than {MAX_DEPTH} levels deep")
        if number > MAX_NODES:
            raise StructureError(f"it has more than {MAX_NODES} objects and arrays")
        if not isinstance(node, Mapping):
            continue
        values, reference = node.get("enum"), node.get("$ref")
        choices += len(values) if isinstance(values, list) else 0
        references |= {reference} if isinstance(reference, str) else set()
        items += _items(node) if is_schema else 0
    if choices > MAX_CHOICES:
        raise StructureError(f"its enumerations have more than {MAX_CHOICES} values")
    if items > MAX_COUNT:
        raise StructureError(
            f"its limits of items and properties (such as maxItems) are more than {MAX_COUNT} together; "
            "give smaller ones, or leave a maximum out"
        )
    if len(references) > MAX_REFERENCES:
        raise StructureError(f"it has more than {MAX_REFERENCES} different references")


def without_unreachable(schema: Any) -> Any:
    """Returns a schema without the maxima that no answer reaches, which clients write to say that there is none."""
    if isinstance(schema, list):
        return [without_unreachable(value) for value in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: value if name in _VALUES else without_unreachable(value)
        for name, value in schema.items()
        if not (_is_number(value) and _unreachable(name, value))
    }


def _items(schema: Mapping[str, Any]) -> int:
    """Returns the sum of the limits of items and properties in one schema, rounded up.

    Raises:
        StructureError: a string's minimum length exceeds `MAX_LENGTH`.
    """
    limits = {name: schema[name] for name in (*_LEAST, *_MOST) if _is_number(schema.get(name))}
    if limits.get("minLength", 0) > MAX_LENGTH:
        raise StructureError(f"minLength: give at most {MAX_LENGTH}")
    reached = (limit for name, limit in limits.items() if name not in _LENGTHS and not _unreachable(name, limit))
    return sum(math.ceil(min(max(limit, 0), MAX_COUNT + 1)) for limit in reached)


def _unreachable(name: str, limit: float) -> bool:
    return name in _MOST and limit >= UNREACHABLE


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # NaN is no number


def _nodes(root: object) -> Iterator[tuple[Mapping[str, object] | Sequence[object], int, bool]]:
    """Yields the objects and arrays of a JSON Schema with their depths, without recursion.

    The last is whether it may be a schema: within the values of `const` and `enum`, nothing is one.
    """
    waiting = [(root, 1, True)]
    while waiting:
        value, depth, is_schema = waiting.pop()
        if isinstance(value, dict):
            yield value, depth, is_schema
            waiting.extend((child, depth + 1, is_schema and name not in _VALUES) for name, child in value.items())
        elif isinstance(value, list):
            yield value, depth, is_schema
            waiting.extend((child, depth + 1, is_schema) for child in value)
