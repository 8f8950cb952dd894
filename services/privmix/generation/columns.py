"""Gives each property of a JSON Schema a type of Arrow, which depends on the schema and never on the values.

So the files of several jobs with one schema have the same columns, and `load_dataset` reads them together:

| schema | column |
| --- | --- |
| string, boolean, integer, number | string, bool, int64, double |
| `enum`, `const` | the type of its values |
| a type or null | the type, with nulls |
| integer or number | double |
| array of one type | a list |
| object that admits no other properties | a struct |
| anything else: several types, open objects, no type | JSON text, also of strings |
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

_DEPTH = 32
"""The most levels of a schema that are read; deeper values, and recursive ones, are JSON text."""
_MAX_INTEGER = 2**63


@dataclass(frozen=True)
class RecordColumn:
    """Holds a type of Arrow, and the function that makes its values of JSON's."""

    type: pa.DataType
    convert: Callable[[Any], Any]

    def value(self, value: Any) -> Any:
        """Returns a value for the column; None for null, and for a value that the type cannot hold."""
        return None if value is None else self.convert(value)


def _string(value: Any) -> str | None:
    return _whole(value) if isinstance(value, str) else None


def _bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _integer(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        return None
    return int(value) if -_MAX_INTEGER <= value < _MAX_INTEGER else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _json(value: Any) -> str:
    return _whole(json.dumps(value, ensure_ascii=False))


def _whole(text: str) -> str:
    """Returns the text with U+FFFD in the place of halves of surrogate pairs, which JSON can hold and Arrow cannot."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


STRING, BOOL = RecordColumn(pa.string(), _string), RecordColumn(pa.bool_(), _bool)
INTEGER, NUMBER = RecordColumn(pa.int64(), _integer), RecordColumn(pa.float64(), _number)
JSON = RecordColumn(pa.string(), _json)
_BY_NAME = {"string": STRING, "boolean": BOOL, "integer": INTEGER, "number": NUMBER}


def columns(schema: Mapping[str, Any]) -> dict[str, RecordColumn]:
    """Returns the columns of the records of a schema, by the names of its properties."""
    return {name: _column(each, schema, 0) or STRING for name, each in schema["properties"].items()}


def _column(schema: Any, root: Mapping[str, Any], depth: int) -> RecordColumn | None:
    """Returns the column of a schema; None if it admits null alone."""
    if depth > _DEPTH or not isinstance(schema, Mapping):
        return JSON
    if "$ref" in schema:
        return _column(_referred(schema["$ref"], root), root, depth + 1)
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return _same([_of_value(value) for value in values] if isinstance(values, Sequence) else [JSON])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), Sequence):
            return _same([_column(each, root, depth + 1) for each in schema[key]])
    if isinstance(schema.get("allOf"), Sequence):
        found = [_column(each, root, depth + 1) for each in [_without_all(schema), *schema["allOf"]]]
        # What says nothing about the type leaves it to the others.
        return _same([each for each in found if each is not JSON] or [JSON])
    names = schema.get("type")
    if isinstance(names, str):
        return _of_type(names, schema, root, depth)
    if isinstance(names, Sequence):
        return _same([_of_type(name, schema, root, depth) for name in names])
    return JSON


def _without_all(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in schema.items() if key != "allOf"}


def _of_type(name: Any, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> RecordColumn | None:
    if name == "null":
        return None
    if name == "array":
        return _list(schema, root, depth)
    if name == "object":
        return _struct(schema, root, depth)
    return _BY_NAME.get(name, JSON)


def _list(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> RecordColumn:
    if "prefixItems" in schema or not isinstance(schema.get("items"), Mapping):
        return JSON
    item = _column(schema["items"], root, depth + 1) or STRING

    def convert(value: Any) -> Any:
        return [item.value(each) for each in value] if isinstance(value, list) else None

    return RecordColumn(pa.list_(item.type), convert)


def _struct(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> RecordColumn:
    properties = schema.get("properties")
    if not properties or schema.get("additionalProperties") is not False or "patternProperties" in schema:
        return JSON  # other properties would be lost
    fields = {name: _column(each, root, depth + 1) or STRING for name, each in properties.items()}

    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            return None
        return {name: field.value(value.get(name)) for name, field in fields.items()}

    return RecordColumn(pa.struct([(name, field.type) for name, field in fields.items()]), convert)


def _of_value(value: Any) -> RecordColumn | None:
    if value is None:
        return None
    kinds = {str: STRING, bool: BOOL, int: INTEGER, float: NUMBER}
    return kinds.get(type(value), JSON)


def _same(alternatives: Sequence[RecordColumn | None]) -> RecordColumn | None:
    """Returns the column that holds all alternatives: theirs if they have one type, doubles for numbers, else JSON."""
    found = [each for each in alternatives if each is not None]
    if not found:
        return None
    if any(each is JSON for each in found):
        return JSON
    if {each.type for each in found} == {INTEGER.type, NUMBER.type}:
        return NUMBER
    return found[0] if all(each.type == found[0].type for each in found) else JSON


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """Returns the schema at a JSON pointer into the root; None if it leads elsewhere."""
    found: Any = root
    steps = str(reference).removeprefix("#").split("/")[1:] if str(reference).startswith("#") else [""]
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
