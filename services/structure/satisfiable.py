"""Decides whether a JSON Schema has a finite value: whether every recursion in it can end.

llguidance compiles schemas whose values never end, such as an object that requires a property of its own kind.
"""

from collections.abc import Mapping
from typing import Any


def has_finite_value(schema: Mapping[str, Any] | bool) -> bool:
    """Returns whether a schema has a finite value, as far as its recursion decides that.

    The schemas with a finite value are the least fixed point of "needs only schemas with a finite value". Keywords
    without subschemas are not evaluated: True may be wrong for a schema that contradicts itself, False is never wrong.
    """
    return _Recursion(schema).has_finite_value()


class _Recursion:
    """Finds the references whose schemas have a finite value."""

    def __init__(self, root: Mapping[str, Any] | bool) -> None:
        self._root = root
        self._targets = {reference: _at(root, reference) for reference in _references(root)}
        self._finite: set[str] = set()

    def has_finite_value(self) -> bool:
        waiting = set(self._targets)
        while found := {reference for reference in waiting if self._ends(self._targets[reference])}:
            self._finite |= found
            waiting -= found
        return self._ends(self._root)

    def _ends(self, schema: object) -> bool:
        """Returns whether a schema needs only references that are known to have a finite value."""
        if not isinstance(schema, Mapping):
            return schema is not False
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._finite:
            return False
        branches = [schema[keyword] for keyword in ("anyOf", "oneOf") if isinstance(schema.get(keyword), list)]
        if not all(any(map(self._ends, alternatives)) for alternatives in branches):
            return False
        if isinstance(schema.get("allOf"), list) and not all(map(self._ends, schema["allOf"])):
            return False
        if "const" in schema or "enum" in schema:
            return True
        types = schema.get("type")
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or any(kind not in ("object", "array") for kind in types):
            return True
        return ("object" in types and self._object_ends(schema)) or ("array" in types and self._array_ends(schema))

    def _object_ends(self, schema: Mapping[str, Any]) -> bool:
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return True
        return all(self._ends(value) for name, value in properties.items() if name in required)

    def _array_ends(self, schema: Mapping[str, Any]) -> bool:
        least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
        if not isinstance(least, int) or not isinstance(first, list):
            return True
        needed = first[:least] + ([schema["items"]] if least > len(first) and "items" in schema else [])
        return all(map(self._ends, needed))


def _references(schema: object) -> set[str]:
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            found |= {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return found


def _at(root: object, reference: str) -> object:
    """Returns the subschema at a local reference; None, as a schema without a condition, if it is no JSON pointer."""
    node, pointer = root, reference.removeprefix("#")
    if pointer and not pointer.startswith("/"):
        return None
    for key in pointer.split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(name)
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node
