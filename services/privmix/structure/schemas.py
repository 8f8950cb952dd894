"""Reads JSON Schemas as alternatives of shapes, which mean the same and have complements and intersections.

All drafts from 4 on are read. A keyword whose complement has no shape narrows the complement (`not`, `if`, overlapping
alternatives of `oneOf`): what is admitted always follows the schema, and what follows it is mostly admitted.
"""

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from itertools import combinations, pairwise, product
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from privmix.structure import patterns
from privmix.structure.errors import StructureError
from privmix.structure.formats import FORMATS
from privmix.structure.numbers import Numbers
from privmix.structure.shapes import (
    ANYTHING,
    Array,
    Atom,
    Contained,
    Items,
    JsonShape,
    Node,
    Object,
    Properties,
    Text,
    canonical,
    joined,
    of_type,
    without,
)

MAX_SHAPES = 400
"""The maximum number of alternative shapes of a schema."""
MAX_NODES = 6000
"""The maximum number of different conjunctions of schemas."""
MAX_LOOK = 4
"""The number of levels down to which contained values are searched for a contradiction."""

_PLACES = {
    "$defs": "a definition",
    "definitions": "a definition",
    "properties": "a property",
    "patternProperties": "a property",
    "additionalProperties": "a property",
    "unevaluatedProperties": "a property",
    "dependentSchemas": "a dependency",
    "dependencies": "a dependency",
    "items": "an item",
    "additionalItems": "an item",
    "prefixItems": "an item",
    "contains": "an item",
    "anyOf": "an alternative",
    "oneOf": "an alternative",
    "allOf": "an alternative",
    "propertyNames": "a name",
    "not": "a condition",
    "if": "a condition",
    "then": "a condition",
    "else": "a condition",
}
_DATA = ("const", "enum", "default", "examples", "example")
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "example", "deprecated", "$comment"))
_MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")
_NO_SHAPE = (
    "format",
    "multipleOf",
    "uniqueItems",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "additionalItems",
    "maxContains",
)


_FORMAT_PATTERNS = frozenset(pattern for expressions in FORMATS.values() for pattern in expressions)


@cache
def _format_expression(pattern: str) -> str | None:
    return patterns.search(pattern)


class _TooManyError(StructureError):
    """There are more than `MAX_SHAPES` shapes."""


class Schemas:
    """Holds the subschemas of one JSON Schema, and finds the shapes of what they admit.

    Raises:
        StructureError: in each method: a keyword has a value that it cannot have, a reference leads nowhere or to
            another document, or there are too many alternatives.
    """

    def __init__(self, root: Mapping[str, Any] | bool) -> None:
        self._schemas: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._meanings: dict[int, int] = {}
        self._said: dict[Hashable, int] = {}
        self._places: dict[int, str] = {}
        self._bases: dict[int, str] = {}
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._dynamic: list[str] = []
        self._shapes: dict[Atom, list[JsonShape]] = {}
        self._node_shapes: dict[Node, list[JsonShape]] = {}
        self._possible: dict[Node, bool] = {}
        self._open: set[Atom] = set()
        self._made: list[Any] = []  # kept, because schemas are known by their identities
        self._contains_evaluates = not (isinstance(root, Mapping) and "2019-09" in str(root.get("$schema")))
        self._expressions: dict[str, str | None] = {}
        self.written: dict[str, Any] = {}
        """The values of enumerations as the schema writes them, by their canonical texts."""
        self.narrowed: set[str] = set()
        """The keywords whose complements were narrowed."""
        self.nothing: Node = (self._atom(False),)
        self._index(root)
        self.root: Node = (self._atom(root),)

    def _index(self, root: Any) -> None:
        """Finds the base address and the place of each subschema, and what `$id` and `$anchor` name."""
        waiting: list[tuple[Any, str, str]] = [(root, "", "the root")]
        while waiting:
            value, base, place = waiting.pop()
            if isinstance(value, list):
                waiting.extend((inner, base, place) for inner in value)
            if not isinstance(value, Mapping):
                continue
            for keyword in ("$id", "id"):
                name = value.get(keyword)
                if isinstance(name, str):
                    base = self._name(base, name, value)
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(value.get(keyword), str):
                    self._anchors.setdefault((base, value[keyword]), value)
            if isinstance(value.get("$dynamicAnchor"), str):
                self._dynamic.append(value["$dynamicAnchor"])
            elif value.get("$recursiveAnchor") is True:
                self._dynamic.append("")
            self._bases[id(value)] = base
            self._places[id(value)] = place
            waiting.extend((inner, base, _PLACES.get(key, place)) for key, inner in value.items() if key not in _DATA)

    def _name(self, base: str, name: str, schema: Any) -> str:
        address, fragment = urldefrag(name)
        if not address:
            self._anchors.setdefault((base, fragment), schema)
            return base
        try:
            base = urljoin(base, address)
        except ValueError:
            raise self.error(schema, "$id", "is no address") from None
        self._resources.setdefault(base, schema)
        return base

    def _atom(self, schema: Any, holds: bool = True) -> Atom:
        if isinstance(schema, bool):
            key = -1 if schema else -2
        elif isinstance(schema, Mapping):
            key = self._meaning(schema)
        else:
            raise StructureError("a subschema is neither an object nor a boolean")
        if key not in self._numbers:
            self._numbers[key] = len(self._schemas)
            self._schemas.append(schema)
        return Atom(self._numbers[key], holds)

    def _meaning(self, schema: Mapping[str, Any]) -> int:
        """Returns a number that schemas share which say the same, such as those of many properties of one kind.

        They share their shapes and rules, too.
        """
        if id(schema) not in self._meanings:
            says = [(key, self._part(key, value)) for key, value in schema.items() if key not in _ANNOTATIONS]
            said = (self._bases.get(id(schema), ""), *says)  # what references in it mean
            self._meanings[id(schema)] = self._said.setdefault(said, len(self._said))
        return self._meanings[id(schema)]

    def _part(self, keyword: str, value: Any) -> Hashable:
        if keyword in _DATA or not isinstance(value, Mapping | list):
            return json.dumps(value)
        if isinstance(value, list):
            return tuple(self._part("", inner) for inner in value)
        if keyword in _MAPS:
            return tuple((name, self._part("", inner)) for name, inner in value.items())
        return self._meaning(value)

    def _node(self, schema: Any, holds: bool = True) -> Node:
        if isinstance(schema, bool | dict) and schema in (True, {}) and schema is not False and holds:
            return ()
        return (self._atom(schema, holds),)

    def error(self, schema: Any, keyword: str, problem: str) -> StructureError:
        """Returns the error of a keyword, which names its place by a word of ours."""
        return StructureError(f"{keyword} in {self._places.get(id(schema), 'the root')}: {problem}")

    def shapes(self, node: Node) -> list[JsonShape]:
        """Returns the alternatives of a node."""
        if not node:
            return [ANYTHING]
        if node not in self._node_shapes:
            if len(self._node_shapes) >= MAX_NODES:
                raise StructureError("it is too complex; make it simpler")
            # A contained value may be of a schema that is being read: that is no circle.
            outer, self._open = self._open, set()
            found = [ANYTHING]
            for atom in node:
                found = self._product(found, self._of(atom))
            self._open = outer
            self._node_shapes[node] = found
        return self._node_shapes[node]

    def property_(self, object_: Object, name: str) -> Node:
        """Returns what a property admits."""
        found: list[Node] = []
        for layer in object_.layers:
            if layer.names and not self.holds(layer.names, name):
                return self.nothing
            named = [node for other, node in layer.named if other == name]
            named += [node for pattern, node in layer.patterns if _found(pattern, name)]
            found += named or [layer.others]
        return joined(*found)

    def holds(self, node: Node, value: Any) -> bool:
        """Tells whether a node admits a value."""
        return not node or any(self.admits(shape, value) for shape in self.shapes(node))

    def admits(self, shape: JsonShape, value: Any) -> bool:
        """Tells whether a shape admits a value."""
        if not shape.has_type_of(value) or (shape.values is not None and canonical(value) not in shape.values):
            return False
        if isinstance(value, str):
            assert shape.text is not None
            return _matches(shape.text, value)
        if isinstance(value, list):
            assert shape.array is not None
            return self._admits_array(shape.array, value)
        if isinstance(value, Mapping):
            object_ = shape.object_
            assert object_ is not None
            return (
                object_.least <= len(value) <= _or_infinite(object_.most)
                and set(object_.required) <= set(value)
                and all(self.holds(self.property_(object_, name), inner) for name, inner in value.items())
            )
        if isinstance(value, bool) or value is None:
            return True
        return shape.numbers is not None and _within(shape.numbers, value)

    def _admits_array(self, array: Array, items: list[Any]) -> bool:
        return (
            array.least <= len(items) <= _or_infinite(array.most)
            and all(self.holds(array.at(index), item) for index, item in enumerate(items))
            and all(self._contains(items, contained) for contained in array.contained)
            and (not array.unique or len(set(map(canonical, items))) == len(items))
        )

    def _contains(self, items: list[Any], contained: Contained) -> bool:
        """Tells whether the number of items that a node admits is within its bounds.

        Where shapes are narrowed, an item may be neither of a node nor of its complement: it counts for the maximum.
        """
        least = sum(self.holds(contained.node, item) for item in items) >= contained.least
        if contained.most is None or not least:
            return least
        others = self.complement(contained.node)
        return sum(not self.holds(others, item) for item in items) <= contained.most

    def complement(self, node: Node) -> Node:
        """Returns the values that a node of one schema at most does not admit."""
        if not node:
            return self.nothing
        (atom,) = node
        return (atom._replace(holds=not atom.holds),)

    def _product(self, one: Sequence[JsonShape], other: Sequence[JsonShape]) -> list[JsonShape]:
        if list(other) == [ANYTHING]:
            return list(one)
        found: dict[JsonShape, None] = {}
        for left, right in product(one, other):
            met = left.both(right)
            met = met and self._pruned(met)
            if met is not None:
                found[met] = None
            if len(found) > MAX_SHAPES:
                raise _TooManyError("it has too many combinations of alternatives; make it simpler")
        return list(found)

    def _pruned(self, shape: JsonShape, depth: int = MAX_LOOK) -> JsonShape | None:
        """Returns a shape without the parts that have no value; None if none is left."""
        if shape.values is not None:
            shape = replace(
                shape, values=tuple(value for value in shape.values if self.admits(shape, json.loads(value)))
            )
        object_, array = shape.object_, shape.array
        if object_ and not all(self.may_have(self.property_(object_, name), depth) for name in object_.required):
            shape = replace(shape, object_=None)
        if array and not all(
            self.may_have(array.at(index), depth) for index in range(min(array.least, array.first + 1))
        ):
            shape = replace(shape, array=None)
        return shape if shape.possible else None

    def may_have(self, node: Node, depth: int = MAX_LOOK) -> bool:
        """Tells whether a node may have a value. False is never wrong."""
        if not depth:
            return True
        if node not in self._possible:
            self._possible[node] = True
            self._possible[node] = any(self._pruned(shape, depth - 1) for shape in self.shapes(node))
        return self._possible[node]

    def _of(self, atom: Atom) -> list[JsonShape]:
        if atom in self._shapes:
            return self._shapes[atom]
        if atom in self._open:
            return []  # it needs itself: without an end it has no value
        self._open.add(atom)
        schema = self._schemas[atom.schema]
        try:
            if isinstance(schema, bool):
                found = [ANYTHING] if schema == atom.holds else []
            else:
                found = self._positive(schema) if atom.holds else self._negative(schema)
                found = found if atom.holds else [shape.as_complement() for shape in found]
        finally:
            self._open.discard(atom)
        self._shapes[atom] = found
        return found

    # What a schema admits.

    def _positive(self, schema: Mapping[str, Any]) -> list[JsonShape]:
        found = [ANYTHING]
        for group in self._groups(schema):
            found = self._product(found, group())
        return self._closed(schema, found)

    def _groups(self, schema: Mapping[str, Any]) -> Iterator[Callable[[], list[JsonShape]]]:
        """Yields the constraints of a schema in the order of its keywords, which is that of its properties."""
        own = False
        for keyword in schema:
            if keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
                yield partial(self._of, self._atom(self._target(schema, keyword)))
            elif keyword == "allOf":
                yield from (partial(self._of, self._atom(inner)) for inner in self._list(schema, keyword))
            elif keyword == "anyOf":
                yield partial(self._any_of, schema)
            elif keyword == "oneOf":
                yield partial(self._one_of, schema)
            elif keyword == "not":
                yield partial(self._of, self._atom(schema["not"], False))
            elif keyword == "if":
                yield partial(self._if, schema)
            elif keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
                yield from self._dependencies(schema, keyword)
            elif not own:
                own = True
                yield partial(self._own, schema)

    def _any_of(self, schema: Mapping[str, Any]) -> list[JsonShape]:
        return self._distinct(self._of(self._atom(inner)) for inner in self._list(schema, "anyOf"))

    def _one_of(self, schema: Mapping[str, Any]) -> list[JsonShape]:
        atoms = [self._atom(inner) for inner in self._list(schema, "oneOf")]
        found: list[list[JsonShape]] = []
        for atom in atoms:
            kept = self._of(atom)
            for other in atoms:
                if other is not atom:
                    kept = self._distinct(self._outside(shape, other) for shape in kept)
            found.append(kept)
        return self._distinct(found)

    def _outside(self, shape: JsonShape, atom: Atom) -> list[JsonShape]:
        """Returns the values of a shape that an atom does not admit."""
        met = (shape.both(other) for other in self._of(atom))
        if not any(one is not None and self._pruned(one) for one in met):
            return [shape]
        try:
            return self._product([shape], self._of(Atom(atom.schema, False)))
        except _TooManyError:
            self.narrowed.add("oneOf")
            return []

    def _distinct(self, lists: Iterable[list[JsonShape]]) -> list[JsonShape]:
        found = list(dict.fromkeys(shape for shapes in lists for shape in shapes))
        if len(found) > MAX_SHAPES:
            raise _TooManyError("it has too many alternatives; make it simpler")
        return found

    def _if(self, schema: Mapping[str, Any]) -> list[JsonShape]:
        if "then" not in schema and "else" not in schema:
            return [ANYTHING]
        then, otherwise = schema.get("then", True), schema.get("else", True)
        return self._distinct(
            [
                self._product(self._of(self._atom(schema["if"])), self._of(self._atom(then))),
                self._product(self._of(self._atom(schema["if"], False)), self._of(self._atom(otherwise))),
            ]
        )

    def _dependencies(self, schema: Mapping[str, Any], keyword: str) -> Iterator[Callable[[], list[JsonShape]]]:
        for name, needs in self._map(schema, keyword).items():
            absent = replace(ANYTHING, object_=self._absent(name))
            if isinstance(needs, list):
                needed = self._names(schema, keyword, needs)
                if not needed:
                    continue
                present = [replace(ANYTHING, object_=Object(required=(name, *needed)))]
            else:
                present = self._product(
                    [replace(ANYTHING, object_=Object(required=(name,)))], self._of(self._atom(needs))
                )
            either = [absent, *filter(None, map(_objects_of, present))]
            yield partial(list, either)

    def _absent(self, name: str) -> Object:
        return Object((Properties(named=((name, self.nothing),), negative=True),))

    def _closed(self, schema: Mapping[str, Any], shapes: list[JsonShape]) -> list[JsonShape]:
        """Applies `unevaluatedProperties` and `unevaluatedItems` to what no other keyword of a schema evaluated."""
        if schema.get("unevaluatedProperties", True) is not True:
            rest = self._node(schema["unevaluatedProperties"])
            shapes = [
                shape if shape.object_ is None else _rest_of_object(shape, shape.object_, rest) for shape in shapes
            ]
        if schema.get("unevaluatedItems", True) is not True:
            rest = self._node(schema["unevaluatedItems"])
            shapes = [
                shape if shape.array is None else self._rest_of_array(shape, shape.array, rest) for shape in shapes
            ]
        return [shape for shape in map(self._pruned, shapes) if shape]

    def _rest_of_array(self, shape: JsonShape, array: Array, rest: Node) -> JsonShape:
        layers = [layer for layer in array.layers if not layer.negative]
        if any(layer.evaluates for layer in layers):
            return shape
        first = max((len(layer.first) for layer in layers), default=0)
        if self._contains_evaluates:
            rest = self._either(rest, *(one.node for one in array.contained if not one.negative))
        layer = Items(tuple(() for _ in range(first)), rest, evaluates=True)
        return replace(shape, array=replace(array, layers=(*array.layers, layer)))

    def _either(self, *nodes: Node) -> Node:
        """Returns the node of the values that one of these nodes admits, each of which has one schema at most."""
        if () in nodes or len(nodes) == 1:
            return () if () in nodes else nodes[0]
        made = {"anyOf": [self._schemas[atom.schema] for (atom,) in nodes]}
        self._made.append(made)
        return self._node(made)

    def _own(self, schema: Mapping[str, Any]) -> list[JsonShape]:
        """Returns the shape of the keywords that say nothing of alternatives."""
        shape = self._typed(schema)
        values = self._values(schema)
        shape = replace(
            shape,
            numbers=shape.numbers and shape.numbers.both(self._number(schema)),
            text=shape.text and self._text(schema),
            array=shape.array and self._array(schema),
            object_=shape.object_ and self._object(schema),
        )
        if values is not None:
            shape = replace(shape, values=tuple(value for value in values if shape.has_type_of(json.loads(value))))
        pruned = self._pruned(shape)
        return [] if pruned is None else [pruned]

    def _typed(self, schema: Mapping[str, Any]) -> JsonShape:
        if "type" not in schema:
            return ANYTHING
        names = self._types(schema)
        parts = [of_type(name) for name in names if name != "integer" or "number" not in names]
        shape = JsonShape()
        for part in parts:
            given = {key: value for key, value in vars(part).items() if value and key != "values"}
            shape = replace(shape, **given)
        return shape

    def _types(self, schema: Mapping[str, Any]) -> list[str]:
        names = schema["type"]
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list):
            raise self.error(schema, "type", "is no type of JSON Schema")
        for name in names:
            try:
                of_type(name)
            except (KeyError, TypeError):
                raise self.error(schema, "type", "is no type of JSON Schema") from None
        return names

    def _values(self, schema: Mapping[str, Any]) -> list[str] | None:
        given = [[schema["const"]]] if "const" in schema else []
        given += [self._list(schema, "enum")] if "enum" in schema else []
        if not given:
            return None
        texts = []
        for values in given:
            texts.append([canonical(value) for value in values])
            for text, value in zip(texts[-1], values, strict=True):
                self.written.setdefault(text, value)
        return [text for text in dict.fromkeys(texts[0]) if all(text in others for others in texts[1:])]

    def _number(self, schema: Mapping[str, Any]) -> Numbers:
        found = Numbers()
        for keyword, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            for name in (keyword, exclusive):
                bound = schema.get(name)
                if bound is None or isinstance(bound, bool):
                    continue
                limit = self._decimal(schema, name)
                is_open = name == exclusive or schema.get(exclusive) is True
                one = (
                    Numbers(low=limit, low_open=is_open)
                    if keyword == "minimum"
                    else Numbers(high=limit, high_open=is_open)
                )
                # `both` is None where there is no such number; keep the bounds, and let the caller find that.
                found = found.both(one) or Numbers(low=Decimal(1), high=Decimal(0))
        if "multipleOf" in schema:
            step = Fraction(self._decimal(schema, "multipleOf"))
            if step <= 0:
                raise self.error(schema, "multipleOf", "is not above 0")
            found = replace(found, steps=frozenset([step]))
        return found

    def _text(self, schema: Mapping[str, Any]) -> Text | None:
        found = [schema["pattern"]] if "pattern" in schema else []
        if not all(isinstance(pattern, str) for pattern in found):
            raise self.error(schema, "pattern", "is no string")
        name = schema.get("format")
        found += FORMATS.get(name, ()) if isinstance(name, str) else ()
        text = Text(self._count(schema, "minLength", 0), self._most(schema, "maxLength"), tuple(found))
        for pattern in found:
            self._check_pattern(schema, "pattern", pattern)
        return text.both(text)

    def expression(self, pattern: str) -> str | None:
        """Returns what `patterns.search` returns. Formats are kept for all schemas, and what clients write is not."""
        if pattern in _FORMAT_PATTERNS:
            return _format_expression(pattern)
        if pattern not in self._expressions:
            self._expressions[pattern] = patterns.search(pattern)
        return self._expressions[pattern]

    def _check_pattern(self, schema: Any, keyword: str, pattern: str) -> None:
        try:
            self.expression(pattern)
        except StructureError as error:
            raise self.error(schema, keyword, str(error).removeprefix("pattern: ")) from None

    def _array(self, schema: Mapping[str, Any]) -> Array | None:
        first: Any = schema.get("prefixItems", [])
        others: Any = schema.get("items", True)
        evaluates = "items" in schema
        if isinstance(others, list):  # before draft 2020-12
            first, others, evaluates = others, schema.get("additionalItems", True), "additionalItems" in schema
        if not isinstance(first, list):
            raise self.error(schema, "prefixItems", "is no list of schemas")
        layer = Items(tuple(map(self._node, first)), self._node(others), evaluates)
        contained: tuple[Contained, ...] = ()
        if "contains" in schema:
            least, most = self._count(schema, "minContains", 1), self._most(schema, "maxContains")
            contained = (Contained(self._node(schema["contains"]), least, most),)
        unique = self._places.get(id(schema), "the root") if schema.get("uniqueItems") is True else None
        if schema.get("uniqueItems", False) not in (True, False):
            raise self.error(schema, "uniqueItems", "is no boolean")
        plain = layer == Items() and not evaluates
        least_items = max([self._count(schema, "minItems", 0), *(one.least for one in contained)])
        array = Array(() if plain else (layer,), least_items, self._most(schema, "maxItems"), contained, unique)
        return array.both(array)

    def _object(self, schema: Mapping[str, Any]) -> Object | None:
        named = tuple((name, self._node(inner)) for name, inner in self._map(schema, "properties").items())
        matched = tuple((name, self._node(inner)) for name, inner in self._map(schema, "patternProperties").items())
        for pattern, _ in matched:
            self._check_pattern(schema, "patternProperties", pattern)
        opens = bool(matched) or "additionalProperties" in schema
        layer = Properties(
            named,
            matched,
            self._node(schema.get("additionalProperties", True)),
            self._node(schema.get("propertyNames", True)),
            bool(named),
            opens,
            evaluates="additionalProperties" in schema,
        )
        required = self._names(schema, "required", self._list(schema, "required", [])) if "required" in schema else ()
        object_ = Object(
            () if layer == Properties() else (layer,),
            required,
            self._count(schema, "minProperties", 0),
            self._most(schema, "maxProperties"),
        )
        return object_.both(object_)

    # What a schema does not admit.

    def _negative(self, schema: Mapping[str, Any]) -> list[JsonShape]:
        """Returns shapes of values that break a keyword of a schema."""
        self.narrowed |= {keyword for keyword in _NO_SHAPE if schema.get(keyword, True) not in (True, {}, [])}
        found: list[list[JsonShape]] = [self._broken(schema)]
        for keyword in schema:
            if keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
                found.append(self._of(self._atom(self._target(schema, keyword), False)))
            elif keyword == "allOf":
                found += [self._of(self._atom(inner, False)) for inner in self._list(schema, keyword)]
            elif keyword == "anyOf":
                found.append(self._none_of(schema, keyword))
            elif keyword == "oneOf":
                atoms = [self._atom(inner) for inner in self._list(schema, keyword)]
                found.append(self._none_of(schema, keyword))
                found += [self._product(self._of(one), self._of(other)) for one, other in combinations(atoms, 2)]
            elif keyword == "not":
                found.append(self._of(self._atom(schema["not"])))
            elif keyword == "if":
                found.append(self._not_if(schema))
            elif keyword == "dependentRequired":
                for name, needs in self._map(schema, keyword).items():
                    found += [
                        [JsonShape(object_=replace(self._absent(need), required=(name,)))]
                        for need in self._names(schema, keyword, needs)
                    ]
        return self._distinct(found)

    def _none_of(self, schema: Mapping[str, Any], keyword: str) -> list[JsonShape]:
        found = [ANYTHING]
        for inner in self._list(schema, keyword):
            found = self._product(found, self._of(self._atom(inner, False)))
        return found

    def _not_if(self, schema: Mapping[str, Any]) -> list[JsonShape]:
        found = []
        for keyword, holds in (("then", True), ("else", False)):
            if keyword in schema:
                condition = self._of(self._atom(schema["if"], holds))
                found.append(self._product(condition, self._of(self._atom(schema[keyword], False))))
        return self._distinct(found)

    def _broken(self, schema: Mapping[str, Any]) -> list[JsonShape]:
        found: list[JsonShape] = []
        if "type" in schema:
            found.append(without(*self._types(schema)))
        values = self._values(schema)
        if values is not None:
            if any(value[0] in "[{" for value in values):
                self.narrowed |= {"const", "enum"} & schema.keys()
            found += _except(values)
        numbers = self._number(schema)
        if numbers.low is not None:
            found.append(JsonShape(numbers=Numbers(high=numbers.low, high_open=not numbers.low_open)))
        if numbers.high is not None:
            found.append(JsonShape(numbers=Numbers(low=numbers.high, low_open=not numbers.high_open)))
        if numbers.steps == frozenset([Fraction(1)]):
            found.append(JsonShape(numbers=Numbers(integer=False)))
        least, most = self._count(schema, "minLength", 0), self._most(schema, "maxLength")
        found += [JsonShape(text=Text(most=least - 1))] if least else []
        found += [JsonShape(text=Text(least=most + 1))] if most is not None else []
        if "pattern" in schema and self._text(schema):
            found.append(JsonShape(text=Text(excluded_patterns=(schema["pattern"],))))
        found += [JsonShape(array=array) for array in self._broken_arrays(schema)]
        found += [JsonShape(object_=object_) for object_ in self._broken_objects(schema)]
        return [pruned for shape in found if (pruned := self._pruned(shape))]

    def _broken_arrays(self, schema: Mapping[str, Any]) -> Iterator[Array]:
        least, most = self._count(schema, "minItems", 0), self._most(schema, "maxItems")
        if least:
            yield Array(most=least - 1)
        if most is not None:
            yield Array(least=most + 1)
        items = schema.get("items", True)
        first = items if isinstance(items, list) else schema.get("prefixItems", [])
        for index, inner in enumerate(first):
            yield Array((Items((*(() for _ in range(index)), self._node(inner, False))),), least=index + 1)
        if not isinstance(items, list) and items is not True and not first:
            yield Array(least=1, contained=(Contained(self._node(items, False)),))
        if "contains" in schema and "maxContains" not in schema and self._count(schema, "minContains", 1) == 1:
            yield Array((Items(others=self._node(schema["contains"], False)),))

    def _broken_objects(self, schema: Mapping[str, Any]) -> Iterator[Object]:
        least, most = self._count(schema, "minProperties", 0), self._most(schema, "maxProperties")
        if least:
            yield Object(most=least - 1)
        if most is not None:
            yield Object(least=most + 1)
        for name in self._names(schema, "required", schema.get("required", [])):
            yield self._absent(name)
        for name, inner in self._map(schema, "properties").items():
            node = self._node(inner, False)
            yield Object((Properties(named=((name, node),), negative=True),), required=(name,))

    # The values of keywords.

    def _target(self, schema: Mapping[str, Any], keyword: str) -> Any:
        """Returns the schema that a reference names."""
        reference, base = schema[keyword], self._bases.get(id(schema), "")
        if not isinstance(reference, str):
            raise self.error(schema, keyword, "is no string")
        address, fragment = urldefrag(reference)
        try:
            address = urljoin(base, address) if address else base
        except ValueError:
            raise self.error(schema, keyword, "is no address") from None
        if address not in self._resources:
            raise self.error(schema, keyword, "refers to another document; define it under $defs")
        if keyword != "$ref" and self._dynamic.count(fragment) > 1:
            raise self.error(schema, keyword, "is not supported where several schemas have its anchor")
        resource = self._resources[address]
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((address, fragment))
        else:
            found = _at(resource, unquote(fragment))
        if not isinstance(found, Mapping | bool):
            raise self.error(schema, keyword, "refers to no schema of this document")
        return found

    def _list(self, schema: Mapping[str, Any], keyword: str, default: Any = None) -> list[Any]:
        value = schema.get(keyword, default)
        if not isinstance(value, list):
            raise self.error(schema, keyword, "is no list")
        return value

    def _map(self, schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
        value = schema.get(keyword, {})
        if not isinstance(value, Mapping):
            raise self.error(schema, keyword, "is no object")
        return value

    def _names(self, schema: Mapping[str, Any], keyword: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(schema, keyword, "is no list of names")
        return tuple(dict.fromkeys(value))

    def _count(self, schema: Mapping[str, Any], keyword: str, default: int) -> int:
        value = schema.get(keyword, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise self.error(schema, keyword, "is no whole number from 0 on")
        return int(value)

    def _most(self, schema: Mapping[str, Any], keyword: str) -> int | None:
        return self._count(schema, keyword, 0) if keyword in schema else None

    def _decimal(self, schema: Mapping[str, Any], keyword: str) -> Decimal:
        value = schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(schema, keyword, "is no number")
        return Decimal(str(value))


def _objects_of(shape: JsonShape) -> JsonShape | None:
    """Returns the objects of a shape; None if it has none."""
    values = None if shape.values is None else tuple(value for value in shape.values if value.startswith("{"))
    return None if shape.object_ is None or values == () else JsonShape(object_=shape.object_, values=values)


def _rest_of_object(shape: JsonShape, object_: Object, rest: Node) -> JsonShape:
    layers = [layer for layer in object_.layers if not layer.negative]
    if any(layer.evaluates for layer in layers):
        return shape
    named = tuple((name, ()) for name in dict.fromkeys(name for layer in layers for name, _ in layer.named))
    matched = tuple((pattern, ()) for layer in layers for pattern, _ in layer.patterns)
    layer = Properties(named, matched, rest, opens=True, evaluates=True)
    return replace(shape, object_=replace(object_, layers=(*object_.layers, layer)))


def _except(values: Sequence[str]) -> list[JsonShape]:
    """Returns shapes of values that are none of these; without arrays or objects, if one is among these."""
    found = [json.loads(value) for value in values]
    texts = tuple(value for value in found if isinstance(value, str))
    truths = frozenset([True, False]) - {value for value in found if isinstance(value, bool)}
    numbers = sorted(
        Decimal(str(value)) for value in found if isinstance(value, int | float) and not isinstance(value, bool)
    )
    rest = JsonShape(
        None not in found,
        truths,
        None if numbers else Numbers(),
        Text(excluded=texts),
        None if any(isinstance(value, list) for value in found) else Array(),
        None if any(isinstance(value, dict) for value in found) else Object(),
    )
    if not numbers:
        return [rest]
    ends = [None, *numbers, None]
    between = (Numbers(low=low, low_open=True, high=high, high_open=True) for low, high in pairwise(ends))
    return [rest, *(JsonShape(numbers=one) for one in between if one.possible)]


def _found(pattern: str, text: str) -> bool:
    try:
        return (
            re.search(pattern.replace("(?<", "(?P<").replace("(?P<=", "(?<=").replace("(?P<!", "(?<!"), text)
            is not None
        )
    except re.error:
        return False


def _matches(text: Text, value: str) -> bool:
    return (
        text.least <= len(value) <= _or_infinite(text.most)
        and all(_found(pattern, value) for pattern in text.patterns)
        and not any(_found(pattern, value) for pattern in text.excluded_patterns)
        and value not in text.excluded
    )


def _within(numbers: Numbers, value: int | float) -> bool:
    number = Decimal(str(value))
    exact = Numbers(low=number, high=number)
    whole = number == number.to_integral_value() if isinstance(value, float) else True
    return (
        numbers.integer in (None, whole)
        and replace(numbers, integer=None).both(exact) is not None
        and all((Fraction(number) / step).denominator == 1 for step in numbers.steps)
    )


def _or_infinite(most: int | None) -> float:
    return float("inf") if most is None else most


def _at(root: object, pointer: str) -> object:
    """Returns what a JSON pointer leads to; None if it leads nowhere."""
    node = root
    for key in pointer.split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(name)
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node
