"""Decides whether a JSON Schema has a finite value: whether every recursion in it can end.

llguidance compiles schemas whose values never end, such as an object that requires a property of its own kind.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Needs = list[list[Sequence[object]]]
"""What the value of a schema needs: of each list, all subschemas of one of its alternatives."""

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


def has_finite_value(schema: Mapping[str, Any] | bool) -> bool:
    """Returns whether a schema has a finite value, as far as its recursion decides that.

    The schemas with a finite value are the least fixed point of "needs only schemas with a finite value". Keywords
    without subschemas are not evaluated: True may be wrong for a schema that contradicts itself, False is never wrong.
    It visits each object of the schema once, whatever number of references lead there.

    Source: Dowling and Gallier, Linear-time algorithms for testing the satisfiability of propositional Horn formulae,
    Journal of Logic Programming 1(3), 1984.
    """
    return _Horn(schema).proves(schema)


@dataclass(slots=True)
class _Rule:
    """Proves `head` when `missing` facts are proved."""

    head: object
    missing: int


class _Horn:
    """Proves which schemas have a finite value. A schema is known by its identity, not by a reference's spelling."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._rules: dict[object, list[_Rule]] = {}  # by each fact that they wait for
        self._proved: set[object] = set()
        self._new: list[object] = []  # proved facts whose rules have not been told
        waiting, seen = [root], {id(root)}
        while waiting:
            for needed in self._read(waiting.pop()):
                if id(needed) not in seen:
                    seen.add(id(needed))
                    waiting.append(needed)
        while self._new:
            for rule in self._rules.pop(self._new.pop(), ()):
                rule.missing -= 1
                if not rule.missing:
                    self._prove(rule.head)

    def proves(self, schema: object) -> bool:
        return id(schema) in self._proved

    def _read(self, schema: object) -> Iterator[object]:
        """Adds the rules of a schema and yields the subschemas that they mention."""
        if not isinstance(schema, Mapping):
            if schema is not False:
                self._prove(id(schema))
            return
        needs = _needs(schema, self._root)
        self._add(id(schema), [(id(schema), place) for place in range(len(needs))])
        for place, alternatives in enumerate(needs):
            for subschemas in alternatives:
                self._add((id(schema), place), [id(subschema) for subschema in subschemas])
                yield from subschemas

    def _add(self, head: object, facts: Sequence[object]) -> None:
        if not facts:
            self._prove(head)
        rule = _Rule(head, len(facts))
        for fact in facts:
            self._rules.setdefault(fact, []).append(rule)

    def _prove(self, fact: object) -> None:
        if fact not in self._proved:
            self._proved.add(fact)
            self._new.append(fact)


def _needs(schema: Mapping[str, Any], root: object) -> Needs:
    reference = schema.get("$ref")
    needs: Needs = [[[_at(root, reference)]]] if isinstance(reference, str) else []
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            needs.append([[subschema] for subschema in schema[keyword]])
    if isinstance(schema.get("allOf"), list):
        needs.append([schema["allOf"]])
    if "const" in schema or "enum" in schema:
        return needs
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if isinstance(types, list) and all(kind in ("object", "array") for kind in types):
        needs.append([_needed_items(schema) if kind == "array" else _needed_properties(schema) for kind in types])
    return needs


def _needed_properties(schema: Mapping[str, Any]) -> Sequence[object]:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return ()
    names = {name for name in required if isinstance(name, str)}
    return [value for name, value in properties.items() if name in names]


def _needed_items(schema: Mapping[str, Any]) -> Sequence[object]:
    least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
    if not isinstance(least, int) or least < 0 or not isinstance(first, list):
        return ()
    return first[:least] + ([schema["items"]] if least > len(first) and "items" in schema else [])


def _at(root: object, reference: str) -> object:
    """Returns the subschema at a local reference; None, as a schema without a condition, if it is no JSON pointer."""
    node, pointer = root, reference.removeprefix("#")
    if pointer and not pointer.startswith("/"):
        return None
    for key in pointer.split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(name)
        elif isinstance(node, list) and _INDEX.fullmatch(name) and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node
