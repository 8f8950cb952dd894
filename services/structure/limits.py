"""Bounds the size of structures before they are compiled."""

from collections.abc import Iterator, Mapping, Sequence

from services.structure.errors import StructureError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 32
MAX_NODES = 2000
MAX_REFERENCES = 256
"""The maximum number of different references in a schema."""
MAX_CHOICES = 5000
"""The maximum number of values of all enumerations of a schema together, and of the strings of a choice."""


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
        StructureError: it exceeds `MAX_DEPTH`, `MAX_NODES`, `MAX_REFERENCES` or `MAX_CHOICES`.
    """
    choices = 0
    references: set[str] = set()
    for count, (node, depth) in enumerate(_nodes(schema), 1):
        if depth > MAX_DEPTH:
            raise StructureError(f"it is nested more than {MAX_DEPTH} levels deep")
        if count > MAX_NODES:
            raise StructureError(f"it has more than {MAX_NODES} objects and arrays")
        if not isinstance(node, Mapping):
            continue
        values, reference = node.get("enum"), node.get("$ref")
        choices += len(values) if isinstance(values, list) else 0
        references |= {reference} if isinstance(reference, str) else set()
    if choices > MAX_CHOICES:
        raise StructureError(f"its enumerations have more than {MAX_CHOICES} values")
    if len(references) > MAX_REFERENCES:
        raise StructureError(f"it has more than {MAX_REFERENCES} different references")


def _nodes(root: object) -> Iterator[tuple[Mapping[str, object] | Sequence[object], int]]:
    """Yields the objects and arrays of a JSON value with their depths, without recursion."""
    waiting = [(root, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, dict | list):
            yield value, depth
            children = value.values() if isinstance(value, dict) else value
            waiting.extend((child, depth + 1) for child in children)
