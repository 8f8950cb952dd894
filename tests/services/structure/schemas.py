"""Makes random JSON Schemas of the kinds that clients send."""

import json
import random
from typing import Any

KINDS = ("string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format")
NESTED = ("array", "object", "object", "anyOf")
PATTERNS = ("^[A-Z]{3}-[0-9]{4}$", r"^[a-z]+@[a-z]+\.com$", "^(yes|no|maybe so)$", r"^\d{4}$", "^a{9,}b?$")
FORMATS = ("date", "date-time", "uuid", "email", "time", "ipv4")
DEPTH = 3


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """Returns a schema that is nested at most `DEPTH` levels deep."""
    kind = chance.choice(KINDS if depth == DEPTH else KINDS + NESTED)
    if kind == "enum":
        return {"enum": [_value(chance) for _ in range(chance.randint(1, 5))]}
    if kind == "const":
        return {"const": _value(chance)}
    if kind == "pattern":
        return {"type": "string", "pattern": chance.choice(PATTERNS)}
    if kind == "format":
        return {"type": "string", "format": chance.choice(FORMATS)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(chance, depth + 1) for _ in range(chance.randint(1, 3))]}
    if kind == "object":
        return _object(chance, depth)
    schema: dict[str, Any] = {"type": kind}
    if kind == "string":
        schema |= _range(chance, "minLength", "maxLength", 0, 12)
    if kind == "integer":
        schema |= _range(chance, "minimum", "maximum", -1000, 1000)
    if kind == "array":
        schema |= {"items": random_schema(chance, depth + 1), **_range(chance, "minItems", "maxItems", 0, 3)}
    return schema


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = [f"f{index}" if chance.random() < 0.9 else _word(chance) for index in range(chance.randint(0, 6))]
    properties = {name: random_schema(chance, depth + 1) for name in names}
    schema = {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if chance.random() < 0.6],
    }
    return schema | ({"additionalProperties": random_schema(chance, depth + 1)} if chance.random() < 0.2 else {})


def _range(chance: random.Random, least: str, most: str, low: int, high: int) -> dict[str, int]:
    first = chance.randint(low, high)
    own = {least: first} if chance.random() < 0.4 else {}
    return own | ({most: max(first, 0) + chance.randint(0, 20)} if chance.random() < 0.4 else {})


def _word(chance: random.Random) -> str:
    return "".join(chance.choices('abcdefgh é"\\日😀', k=chance.randint(1, 12)))


def _value(chance: random.Random) -> Any:
    return chance.choice([_word(chance), chance.randint(-9, 99_999), None, True, [1, "a"], {"k": 1}])


def described(schema: dict[str, Any]) -> str:
    """Returns a schema for the message of a failed test."""
    return json.dumps(schema)[:2000]
