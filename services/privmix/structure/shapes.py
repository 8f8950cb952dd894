"""Describes sets of JSON values, by type, in a form that a grammar can follow and that has intersections.

A `JsonShape` has a part for each type of JSON; a schema is a list of alternative shapes (`schemas`). Where a part
contains other values, it names them by a `Node`: a conjunction of schemas and complements of schemas.
"""

import json
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from privmix.structure.numbers import Numbers


class Atom(NamedTuple):
    """A schema, by its number, or its complement."""

    schema: int
    holds: bool = True


Node = tuple[Atom, ...]
"""The values that all of these atoms admit; all JSON values, if there are none."""


def joined(*nodes: Node) -> Node:
    return tuple(dict.fromkeys(atom for node in nodes for atom in node))


@dataclass(frozen=True)
class Text:
    """Describes strings: by their number of characters, and by patterns and texts that they match or do not match."""

    least: int = 0
    most: int | None = None
    patterns: tuple[str, ...] = ()
    excluded_patterns: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    def both(self, other: "Text") -> "Text | None":
        met = Text(
            max(self.least, other.least),
            _smaller(self.most, other.most),
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            tuple(dict.fromkeys(self.excluded_patterns + other.excluded_patterns)),
            tuple(dict.fromkeys(self.excluded + other.excluded)),
        )
        return met if met.most is None or met.least <= met.most else None


@dataclass(frozen=True)
class Items:
    """What one schema says of the items of an array: the first ones each, and all others, if it `evaluates` them.

    Attributes:
        negative: it is a complement, which evaluates no item.
    """

    first: tuple[Node, ...] = ()
    others: Node = ()
    evaluates: bool = False
    negative: bool = False

    def at(self, index: int) -> Node:
        return self.first[index] if index < len(self.first) else self.others


@dataclass(frozen=True)
class Contained:
    """Bounds the number of items that a node admits.

    Attributes:
        negative: it is a complement, which evaluates no item.
    """

    node: Node
    least: int = 1
    most: int | None = None
    negative: bool = False


@dataclass(frozen=True)
class Array:
    """Describes arrays. `unique` is the place of a schema that demands different items, if there is one."""

    layers: tuple[Items, ...] = ()
    least: int = 0
    most: int | None = None
    contained: tuple[Contained, ...] = ()
    unique: str | None = None

    def at(self, index: int) -> Node:
        return joined(*(layer.at(index) for layer in self.layers))

    @property
    def first(self) -> int:
        """The number of items that schemas name one by one."""
        return max((len(layer.first) for layer in self.layers), default=0)

    def both(self, other: "Array") -> "Array | None":
        met = Array(
            tuple(dict.fromkeys(self.layers + other.layers)),
            max(self.least, other.least),
            _smaller(self.most, other.most),
            tuple(dict.fromkeys(self.contained + other.contained)),
            self.unique or other.unique,
        )
        return met if met.most is None or met.least <= met.most else None


@dataclass(frozen=True)
class Properties:
    """What one schema says of the properties of an object.

    Attributes:
        named: the properties that it names.
        patterns: patterns of names, each with what properties admit whose names match it.
        others: what all other properties admit.
        names: what the names themselves match.
        closes: it names properties and says nothing of others.
        opens: it says which others there are.
        evaluates: it says what others admit.
        negative: it is a complement, which evaluates no property.
    """

    named: tuple[tuple[str, Node], ...] = ()
    patterns: tuple[tuple[str, Node], ...] = ()
    others: Node = ()
    names: Node = ()
    closes: bool = False
    opens: bool = False
    evaluates: bool = False
    negative: bool = False


@dataclass(frozen=True)
class Object:
    """Describes objects. `required` is in the order of the schemas."""

    layers: tuple[Properties, ...] = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None

    @property
    def named(self) -> tuple[str, ...]:
        """The names that schemas mention, in their order."""
        return tuple(dict.fromkeys([name for layer in self.layers for name, _ in layer.named] + list(self.required)))

    def both(self, other: "Object") -> "Object | None":
        met = Object(
            tuple(dict.fromkeys(self.layers + other.layers)),
            tuple(dict.fromkeys(self.required + other.required)),
            max(self.least, other.least),
            _smaller(self.most, other.most),
        )
        return met if met.most is None or max(met.least, len(met.required)) <= met.most else None


@dataclass(frozen=True)
class JsonShape:
    """Describes JSON values: those of the parts that are not None, and, if there are `values`, only those.

    Attributes:
        values: JSON texts as `canonical` writes them.
    """

    null: bool = False
    booleans: frozenset[bool] = frozenset()
    numbers: Numbers | None = None
    text: Text | None = None
    array: Array | None = None
    object_: Object | None = None
    values: tuple[str, ...] | None = None

    def both(self, other: "JsonShape") -> "JsonShape | None":
        """Returns the values of both shapes; None if there are none."""
        met = JsonShape(
            self.null and other.null,
            self.booleans & other.booleans,
            self.numbers and other.numbers and self.numbers.both(other.numbers),
            self.text and other.text and self.text.both(other.text),
            self.array and other.array and self.array.both(other.array),
            self.object_ and other.object_ and self.object_.both(other.object_),
        )
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            values = tuple(value for value in self.values if value in set(other.values))
        if values is not None:
            met = replace(met, values=tuple(value for value in values if met.has_type_of(json.loads(value))))
        return met if met.possible else None

    def as_complement(self) -> "JsonShape":
        """Returns the same values, of which nothing counts as evaluated."""
        array, object_ = self.array, self.object_
        if array:
            array = replace(
                array,
                layers=tuple(replace(layer, negative=True) for layer in array.layers),
                contained=tuple(replace(one, negative=True) for one in array.contained),
            )
        if object_:
            object_ = replace(object_, layers=tuple(replace(layer, negative=True) for layer in object_.layers))
        return replace(self, array=array, object_=object_)

    @property
    def possible(self) -> bool:
        """Whether there may be a value, without a look at contained values."""
        return any(self.parts) if self.values is None else bool(self.values)

    @property
    def parts(self) -> tuple[object, ...]:
        return self.null, self.booleans, self.numbers, self.text, self.array, self.object_

    def has_type_of(self, value: Any) -> bool:
        """Returns whether a value may be of the shape, by its type, its length and its bounds alone."""
        if value is None:
            return self.null
        if isinstance(value, bool):
            return value in self.booleans
        if isinstance(value, int | float):
            integer = None if self.numbers is None else self.numbers.integer
            return self.numbers is not None and integer in (None, isinstance(value, int) or value.is_integer())
        if isinstance(value, str):
            return self.text is not None and value not in self.text.excluded
        return (self.array if isinstance(value, list) else self.object_) is not None


ANYTHING = JsonShape(True, frozenset([True, False]), Numbers(), Text(), Array(), Object())


def of_type(name: str) -> JsonShape:
    """Returns the shape of a type of JSON Schema.

    Raises:
        KeyError: there is no such type.
    """
    return _TYPES[name]


_TYPES = {
    "null": JsonShape(null=True),
    "boolean": JsonShape(booleans=frozenset([True, False])),
    "integer": JsonShape(numbers=Numbers(integer=True)),
    "number": JsonShape(numbers=Numbers()),
    "string": JsonShape(text=Text()),
    "array": JsonShape(array=Array()),
    "object": JsonShape(object_=Object()),
}


def without(*names: str) -> JsonShape:
    """Returns the shape of all values that are of none of these types."""
    kept = ANYTHING
    for name in names:
        if name == "integer":
            kept = replace(kept, numbers=kept.numbers and kept.numbers.both(Numbers(integer=False)))
        else:
            part = {"null": "null", "boolean": "booleans", "number": "numbers", "string": "text"}.get(name, name)
            part = "object_" if part == "object" else part
            none: dict[str, Any] = {part: getattr(JsonShape(), part)}
            kept = replace(kept, **none)
    return kept


def canonical(value: Any) -> str:
    """Returns the JSON text of a value that is the same for equal values. 1.0 is 1, as JSON Schema says."""
    return json.dumps(_plain(value), ensure_ascii=False, sort_keys=True, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _smaller(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)
