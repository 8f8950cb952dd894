"""Makes random JSON Schemas, most of which admit a value, of keywords that meet each other."""

import random
from typing import Any

NAMES = ("a", "b", "ab", "x y", 'q"')
TEXTS = ("", "a", "ab", "b\n", 'q"', "é")
PATTERNS = ("^a", "b$", "^[a-c]*$", "a|^$", r"\d", '["\\\\]')
NUMBERS = (-7, -1.5, -1, 0, 0.25, 1, 2, 2.5, 10, 99)
FORMATS = ("date", "ipv4", "uuid", "email")


def random_schema(chance: random.Random, depth: int = 3) -> Any:
    """Returns a schema of at most this depth, which may refer to two others of its own."""
    schema = _schema(chance, depth)
    if isinstance(schema, dict):
        schema["$defs"] = {name: _schema(chance, depth - 1) for name in ("p", "q")}
    return schema


def _schema(chance: random.Random, depth: int) -> Any:
    if depth <= 0 or chance.random() < 0.05:
        return chance.choice([True, True, False, {"type": "integer"}, {"type": "string", "maxLength": 3}, {"const": 1}])
    made: dict[str, Any] = {}
    kinds = ("integer", "number", "string", "array", "object", "boolean", "null")
    if chance.random() < 0.85:
        made["type"] = chance.choice(kinds) if chance.random() < 0.8 else chance.sample(kinds, 2)
    makers = [_numbers, _texts, _arrays, _objects, _values]
    for maker in chance.sample(makers, chance.randint(0, 2)):
        maker(chance, depth, made)
    types = made.get("type", ())
    for kind, maker in (("number", _numbers), ("string", _texts), ("array", _arrays), ("object", _objects)):
        if kind in types and chance.random() < 0.8:
            maker(chance, depth, made)
    if chance.random() < 0.4:
        _composed(chance, depth, made)
    return made


def _numbers(chance: random.Random, _: int, made: dict[str, Any]) -> None:
    low, high = sorted(chance.sample(NUMBERS, 2))
    bounds = (("minimum", low), ("exclusiveMinimum", low), ("maximum", high), ("exclusiveMaximum", high))
    made |= {keyword: value for keyword, value in bounds if chance.random() < 0.35}
    if chance.random() < 0.2:
        made["multipleOf"] = chance.choice([1, 2, 3, 0.5, 0.01, 2.5])


def _texts(chance: random.Random, _: int, made: dict[str, Any]) -> None:
    made["maxLength"] = chance.randint(1, 6)
    some = (
        ("minLength", chance.randint(0, 3)),
        ("pattern", chance.choice(PATTERNS)),
        ("format", chance.choice(FORMATS)),
    )
    made |= {keyword: value for keyword, value in some if chance.random() < 0.3}


def _arrays(chance: random.Random, depth: int, made: dict[str, Any]) -> None:
    made["maxItems"] = chance.randint(0, 4)
    some = (
        ("items", _schema(chance, depth - 1)),
        ("prefixItems", [_schema(chance, depth - 1) for _ in range(chance.randint(1, 2))]),
        ("minItems", chance.randint(0, 2)),
    )
    made |= {keyword: value for keyword, value in some if chance.random() < (0.6 if keyword == "items" else 0.15)}


def _objects(chance: random.Random, depth: int, made: dict[str, Any]) -> None:
    names = chance.sample(NAMES, chance.randint(0, 3))
    made["properties"] = {name: _schema(chance, depth - 1) for name in names}
    some = (
        ("required", chance.sample(NAMES, chance.randint(0, 2))),
        ("additionalProperties", _schema(chance, depth - 1)),
        ("patternProperties", {chance.choice(PATTERNS): _schema(chance, depth - 1)}),
        ("minProperties", chance.randint(0, 2)),
        ("maxProperties", chance.randint(1, 3)),
    )
    made |= {keyword: value for keyword, value in some if chance.random() < (0.6 if keyword == "required" else 0.15)}


def _values(chance: random.Random, _: int, made: dict[str, Any]) -> None:
    known: list[Any] = [*TEXTS, *NUMBERS, True, None, [], [1, "a"], {"a": 1}, {"b": [], "a": None}]
    values = chance.sample(known, 4)
    made.update({"enum": values} if chance.random() < 0.7 else {"const": values[0]})


def _composed(chance: random.Random, depth: int, made: dict[str, Any]) -> None:
    keyword = chance.choice(["allOf", "anyOf", "oneOf", "$ref"])
    if keyword == "$ref":
        made["$ref"] = chance.choice(["#", "#/$defs/p", "#/$defs/q"])
    else:
        made[keyword] = [_schema(chance, depth - 1) for _ in range(chance.randint(1, 3))]
