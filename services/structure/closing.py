"""Closes the objects of a JSON Schema: an object that names its properties has no others, unless the schema says so.

A model that may add properties seldom ends an object; clients name the properties that they want. xgrammar, vLLM's
default engine, reads schemas in the same way.
"""

from collections.abc import Mapping
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalProperties")
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_COMPOSED = ("$ref", "anyOf", "oneOf")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema whose objects have only the properties that it names.

    Where a schema joins the properties of several schemas (`allOf`, or a reference or alternatives beside properties),
    to close each of them would leave no value. Such a schema is returned unchanged.
    """
    return dict(schema) if _joins(schema) else _closed(schema)


def _joins(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    own = "allOf" in schema or ("properties" in schema and any(keyword in schema for keyword in _COMPOSED))
    return own or any(map(_joins, _subschemas(schema)))


def _subschemas(schema: Mapping[str, Any]) -> list[Any]:
    found = [schema[keyword] for keyword in _SINGLE if keyword in schema]
    for keyword in _MAPS:
        found += schema[keyword].values() if isinstance(schema.get(keyword), Mapping) else ()
    for keyword in _LISTS:
        found += schema[keyword] if isinstance(schema.get(keyword), list) else ()
    return found


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for keyword in _MAPS:
        if isinstance(result.get(keyword), Mapping):
            result[keyword] = {name: _closed(value) for name, value in result[keyword].items()}
    for keyword in _LISTS:
        if isinstance(result.get(keyword), list):
            result[keyword] = [_closed(value) for value in result[keyword]]
    for keyword in _SINGLE:
        if keyword in result:
            result[keyword] = _closed(result[keyword])
    if "properties" in result and not any(keyword in result for keyword in _OPEN):
        result["additionalProperties"] = False
    return result
