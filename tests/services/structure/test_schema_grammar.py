"""Claim: what the grammar of a JSON Schema admits is a value of the schema, and its values are admitted."""

import json
import re
from typing import Any

import pytest

from privmix.structure import grammar
from privmix.structure.errors import StructureError
from tests.support.structure import engine, follows

NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
OTHER: dict[str, Any] = {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]}


def admits(schema: Any, text: str, make: Any = grammar.of_json_schema) -> bool:
    return follows(engine(make(schema)), text)


def of_arguments(schema: Any) -> str:
    return grammar.of_tool_call({"f": schema})


def check(schema: Any, admitted: str, refused: str) -> None:
    """Checks texts, which are separated by two spaces."""
    made = engine(grammar.of_json_schema(schema))
    assert [text for text in admitted.split("  ") if not follows(made, text)] == []
    assert [text for text in refused.split("  ") if follows(made, text)] == []


@pytest.mark.parametrize(
    ("schema", "admitted", "refused"),
    [
        ({"type": "number", "exclusiveMinimum": 0}, "0.5  0.001  12  1e5  1.5e-07", "0  0.0  -1  0e5  -0"),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": 0}, "0.1  3", "0  0.00"),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, "0.1  3", "0  0.00"),
        ({"type": "number", "maximum": 0, "exclusiveMaximum": 0}, "-0.1  -3  -1e9", "0  -0  -0.0"),
        ({"type": "number", "minimum": -1.25, "maximum": 10.5}, "-1.25  -1.2  10.50  0  9.99", "-1.26  10.51  11  1e0"),
        ({"type": "number", "exclusiveMinimum": 1.5, "exclusiveMaximum": 1.75}, "1.6  1.7499", "1.5  1.75  1.8  1"),
        ({"type": "integer", "minimum": -5, "maximum": 12}, "-5  0  12", "-6  13  -0  1.0  01"),
        ({"type": "integer", "exclusiveMinimum": 99, "maximum": 1000}, "100  999  1000", "99  1001"),
        ({"type": "integer"}, "12345678901234567  -1", "123456789012345678  -0  1e3"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, str(2**63 - 1), str(2**63)),
        (
            {"type": "number"},
            "1.2345678901234567  1e306  -2e-306  0.00001",
            "1e999  1e307  1.23456789012345678  -0  -0.0",
        ),
        ({"type": "integer", "multipleOf": 7}, "-14  0  7  70", "8  -8  -0"),
        ({"type": "integer", "multipleOf": 7, "minimum": -20, "maximum": 20}, "-14  14  0", "21  -21"),
        ({"type": "number", "multipleOf": 0.01}, "1.25  -1.5  3  2.50", "1.251  0.001"),
        ({"type": "number", "multipleOf": 0.5, "minimum": 0}, "1.5  2  2.0", "1.25  -1.5"),
        ({"type": "number", "multipleOf": 2.5}, "5  -7.5  0  12345678901232.5", "4  2  18194097106111917.5"),
        ({"allOf": [{"multipleOf": 4}, {"multipleOf": 6}], "type": "integer"}, "12  -24", "4  6"),
        (
            {"type": "number", "not": {"type": "integer"}},
            "1.5  -0.25",
            "1  2.0  3311765911089704.1  18194097106111917.5",
        ),
        ({"type": "number", "multipleOf": 0.5, "not": {"type": "integer"}}, "1.5  -0.50", "1  2.0  0.25  -0.0101"),
        ({"type": ["number", "null"], "multipleOf": 1, "not": {"type": "integer"}}, "null", "1  1.5"),
        ({"type": "number", "multipleOf": 0.5}, "1.5  12345678901234.5", "3311765911089704.5  18194097106111917.5"),
        ({"type": ["integer", "string"], "not": {"enum": [3, "x"]}}, '2  4  "y"  "xx"', '3  "x"'),
    ],
)
def test_numbers(schema: Any, admitted: str, refused: str) -> None:
    check(schema, admitted, refused)


@pytest.mark.parametrize(
    ("name", "admitted", "refused"),
    [
        ("date", '"2024-02-29"  "2000-02-29"', '"2023-02-29"  "1900-02-29"  "0000-01-01"  "2024-04-31"  "2024-13-01"'),
        ("time", '"23:59:59Z"  "08:30:06.5+01:00"', '"23:59:60Z"  "24:00:00Z"  "08:30:06"'),
        ("date-time", '"2024-02-29T23:59:59Z"', '"2023-02-29T23:59:59Z"  "2016-12-31T23:59:60Z"  "2024-02-29"'),
        ("hostname", '"a.example.com"  "a-b"', '"-a"  "a-"  "a..b"  "a_b"  "xn--x"  "a."'),
        ("email", '"ada.l+x@example.com"', '"ada"  "@x"  "a..b@x"  "a@-x"'),
        ("ipv4", '"127.0.0.1"', '"256.0.0.1"  "127.0.0"  "01.0.0.1"'),
        (
            "ipv6",
            '"::1"  "::"  "1:2:3:4:5:6:7:8"  "::ffff:1.2.3.4"  "1::8"',
            '"1:2"  "1::2::3"  "1:2:3:4:5:6:7:8:9"  ":::"',
        ),
        ("uuid", '"123e4567-e89b-12d3-a456-426614174000"', '"123e4567"'),
        ("uri", '"https://a.b/c?d=e#f"  "urn:isbn:1"  "file:///a/b"', '"a b"  "//a"  "a"'),
        ("duration", '"P1DT2H"  "P3W"  "PT86400S"', '"P"  "PT"  "P1H"  "P999999999Y"  "PT999999999H"'),
        ("uuid4", '"123e4567-e89b-42d3-a456-426614174000"', '"123e4567-e89b-12d3-a456-426614174000"  "a"'),
        ("ipvanyaddress", '"127.0.0.1"  "::1"', '"127"'),
        ("ipv4interface", '"127.0.0.1/8"  "127.0.0.1"', '"127.0.0.1/33"'),
        ("ipv6interface", '"::1/128"  "::1"', '"::1/129"'),
        ("ipv4network", '"10.0.0.0/8"  "10.1.2.3/32"  "10.1.0.0/16"', '"10.1.2.3/8"  "10.1.0.0/33"'),
        ("ipv6network", '"2001:db8::/32"  "::1/128"  "::/0"', '"2001:db8::1/32"'),
        ("base64", '"YWI="  ""  "YWJj"', '"YWI"  "a b"'),
        ("colour of the sea", '"anything"', "1"),
    ],
)
def test_formats_are_followed_and_unknown_ones_are_annotations(name: str, admitted: str, refused: str) -> None:
    check({"type": "string", "format": name}, admitted, refused)


@pytest.mark.parametrize(
    ("pattern", "admitted", "refused"),
    [
        ("b+", '"b"  "abba"', '"a"  ""'),
        ("^a|b$", '"ax"  "xb"', '"xa"  "bx"'),
        ("(^a|^b)c$", '"ac"  "bc"', '"xac"  "c"'),
        ("(?i)^straße$", '"straße"  "STRAßE"', '"strase"'),
        ("^(?i:a)b$", '"ab"  "Ab"', '"aB"'),
        (r"^(?=.*\d)(?=.*[a-z])[a-z0-9]{3,5}$", '"ab1"  "1a23"', '"abc"  "123"  "a1"'),
        ("^(?!foo)[a-z]+$", '"fo"  "bar"', '"foo"  "food"'),
        ('^["/\\\\]+$', r'"\""  "\\"  "/\"\\"', '"a"  ""'),
        (r"^\s\S$", r'"\na"  " \""', r'"aa"  "\n\n"'),
        (r"^[^a]\W.$", r'"b-c"  "\"\\\""', '"a-c"  "bbb"'),
        (r"^\p{Lu}\u00e9$", '"Aé"', '"aé"'),
        ("^(?:a{2,3}){2}$", '"aaaa"  "aaaaaa"', '"aaa"  "aaaaaaa"'),
        ("a.{0,99}b", '"ab"  "ccaxxbxx"  "aab"', '"ba"  "cc"'),
        ("[^a]x{0,99}a", '"ba"  "aabxxab"', '"ab"  "aa"'),
    ],
)
def test_patterns_are_searched(pattern: str, admitted: str, refused: str) -> None:
    check({"type": "string", "pattern": pattern}, admitted, refused)


OBJECTS: list[tuple[Any, str, str]] = [
    (NAMED, '{"a": 1}', '{}  {"a": 1, "b": 2}  {"a": 2}'),
    ({"allOf": [NAMED, OTHER]}, '{"a": 1, "b": 2}', '{"a": 1}  {"b": 2}  {"a": 1, "b": 2, "c": 3}'),
    (NAMED | {"additionalProperties": True}, '{"a": 1}  {"a": 1, "c": [2]}', "{}"),
    (NAMED | {"patternProperties": {"^b": {"type": "null"}}}, '{"a": 1, "b": null}', '{"a": 1, "b": 2}'),
    (
        {"type": "object", "patternProperties": {"^x": {"type": "null"}, "y$": {"const": 1}}},
        '{}  {"x": null}  {"by": 1}',
        '{"b": null}  {"xy": 1}  {"x": 1}',
    ),
    (
        {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": True},
        '{"x": null, "b": 2}',
        '{"x": 1}',
    ),
    ({"type": "object", "patternProperties": {"^x": {}}, "required": ["b"]}, '{"b": 2, "x": 1}', '{"b": 1, "c": 1}'),
    (
        {"type": "object", "required": ["x"], "properties": {"y": {"const": 1}}},
        '{"y": 1, "x": true}  {"x": 0}',
        '{"y": 1}',
    ),
    ({"type": "object"}, '{}  {"any": 1}', "1  []"),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        '{}  {"a": 1, "b": 2}',
        '{"c": 1}  {"a": "x"}  {"a": 1, "a": 2}',
    ),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, '{"x": 1}  {"xy": {}}', '{"y": 1}'),
    (
        {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}, "type": "object"},
        '{"b": 1}  {"a": 1, "b": 2}  {}',
        '{"a": 1}',
    ),
    (
        {"properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"enum": [1, [2]]}}, "type": "object"},
        '{"b": 1}',
        '{"a": 1}  {"a": 1, "b": 1}',
    ),
    (
        {"properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"enum": [1, {"a": 1}]}}, "type": "object"},
        '{"b": 1}  {"a": 1}',
        '{"a": 2}  {"a": 1, "b": 1}',
    ),
    ({"properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}, "type": "object"}, '{"b": 1}  {}', '{"a": 1}'),
    ({"type": "object", "properties": {"a": {}}, "dependentRequired": {}}, '{"a": 1}', '{"b": 1}'),
    ({"type": "object", "properties": {"a": False, "b": {}}}, '{"b": 1}  {}', '{"a": 1}'),
    (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/x"}, "b": {}},
            "$defs": {"x": {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"]}},
        },
        '{"b": 1}  {}',
        '{"a": {}}',
    ),
    (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "maxProperties": 2},
        '{"a": 1, "c": 2}',
        '{"a": 1}  {"a": 1, "b": 1, "c": 1}  {}',
    ),
    (
        {"type": "object", "minProperties": 1, "maxProperties": 2},
        '{"x": 1}  {"x": 1, "y": 2}',
        '{}  {"x": 1, "y": 2, "z": 3}',
    ),
    (  # two properties that one rule writes may have one name
        {"type": "object", "minProperties": 3, "propertyNames": {"pattern": "^[ab]$|^$"}, "additionalProperties": {}},
        '{"": 1, "a": 1, "b": 2}',
        '{"a": 1, "b": 2}  {"a": 1, "b": 2, "b": 3}',
    ),
    (
        {
            "type": "object",
            "properties": {"a": {}},
            "unevaluatedProperties": False,
            "allOf": [{"properties": {"b": {}}}],
        },
        '{"a": 1, "b": 1}',
        '{"c": 1}',
    ),
    (NAMED | {"properties": {"a": {"const": 1}, "b": {"$ref": "#"}}}, '{"a": 1, "b": {"a": 1}}', '{"b": {"a": 1}}'),
]


@pytest.mark.parametrize(("schema", "admitted", "refused"), OBJECTS)
def test_objects(schema: Any, admitted: str, refused: str) -> None:
    check(schema, admitted, refused)


@pytest.mark.parametrize(
    ("schema", "admitted", "refused"),
    [
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3.0},
            "[1]  [1, 2, 3]",
            "[]  [1, 2, 3, 4]",
        ),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}}, "[]  [1]  [1, 2, 2]", "[2]"),
        ({"type": "array", "items": [{"const": 1}], "additionalItems": False}, "[1]", "[1, 1]"),
        (
            {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
            '["b", "a"]  ["a", "b", "c"]',
            '["a"]  ["a", "a"]',
        ),
        (
            {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 1},
            "[]  [true]",
            "[true, false]",
        ),
        (
            {"anyOf": [{"type": "array", "items": {"const": 1}, "uniqueItems": True, "minItems": 2}, {"const": [2]}]},
            "[2]",
            "[1]  [1, 1]",
        ),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": False}, '["a", "a"]', "[1]"),
        ({"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}}, "[1, 2]  [2]", "[]  [1]"),
        (
            {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}, "minContains": 2, "maxContains": 2},
            "[2, 1, 2]",
            "[2]  [2, 2, 2]",
        ),
        (  # no item does for both
            {"items": {"enum": [1, 2, 3]}, "allOf": [{"contains": {"const": 1}}, {"contains": {"const": 2}}]},
            "[1, 2]  [3, 2, 1, 1]",
            "[1]  [1, 1]  [2, 3]",
        ),
        (
            {
                "items": {"enum": [1, 2]},
                "contains": {"const": 1},
                "minContains": 2,
                "allOf": [{"contains": {"const": 2}, "maxContains": 1}],
                "type": "array",
            },
            "[1, 2, 1]  [1, 1, 1, 2]",
            "[1, 2]  [1, 1]  [1, 2, 1, 2]",
        ),
        (
            {"enum": [[2], [1, 4], [3]], "contains": {"not": {"multipleOf": 2}}, "minContains": 0, "maxContains": 0},
            "[2]",
            "[3]  [1, 4]",
        ),
        (  # what `contains` admits is evaluated, but not in a complement, nor in the draft of 2019-09
            {"type": "array", "prefixItems": [{}], "contains": {"type": "string"}, "unevaluatedItems": False},
            '[1, "a"]  ["a"]',
            '[1]  [1, "a", 2]',
        ),
        (
            {"type": "array", "contains": {"const": 1}, "minContains": 0, "unevaluatedItems": {"const": 2}},
            "[1, 2, 1]  []",
            "[3]  [1, 3]",
        ),
        (
            {"type": "array", "not": {"not": {"contains": {"enum": [1, 2]}}}, "unevaluatedItems": {"const": 2}},
            "[2, 2]",
            "[1, 2]  []",
        ),
        (
            {
                "$schema": "https://json-schema.org/draft/2019-09/schema",
                "type": "array",
                "prefixItems": [{}],
                "contains": {"const": 1},
                "unevaluatedItems": {"const": 2},
            },
            "[1, 2]",
            "[1, 1]",
        ),
        ({"type": "array", "not": {"items": {"type": "integer"}}}, '["a"]  [1, "a"]', "[]  [1]"),
    ],
)
def test_arrays(schema: Any, admitted: str, refused: str) -> None:
    check(schema, admitted, refused)


@pytest.mark.parametrize(
    ("schema", "admitted", "refused"),
    [
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            '{"a": 1}  {"b": 1}',
            '{"a": 1, "b": 1}  {}',
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, "1  2.5", "2  3  1.5"),
        ({"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]}, "2  6", "3  5"),
        # What a closed object would be is no matter of `oneOf`: the first admits the second's values too.
        (
            {"oneOf": [NAMED, NAMED | OTHER | {"properties": {"a": {"const": 1}, "b": {"const": 2}}}]},
            '{"a": 1}  {"b": 2}',
            '{"a": 1, "b": 2}',
        ),
        (
            {
                "oneOf": [
                    {"properties": {"k": {"const": "x"}, "v": {"type": "integer"}}, "required": ["k", "v"]},
                    {"properties": {"k": {"const": "y"}}, "required": ["k"]},
                ]
            },
            '{"k": "x", "v": 1}  {"k": "y"}',
            '{"k": "x"}',
        ),
        (
            {
                "if": {"properties": {"k": {"const": 1}}},
                "then": {"required": ["v"]},
                "type": "object",
                "properties": {"k": {"enum": [1, 2]}, "v": {"const": 0}},
                "required": ["k"],
            },
            '{"k": 1, "v": 0}  {"k": 2}  {"k": 2, "v": 0}',
            '{"k": 1}',
        ),
        ({"not": {"type": "object"}, "type": ["object", "null"]}, "null", "{}"),
        ({"anyOf": [{"type": "string", "maxLength": 1}, {"const": "long"}]}, '"l"  "long"', '"lo"'),
        ({"enum": [1, "a", {"b": [1.0, None]}, [2]], "type": ["object", "array"]}, '{"b": [1, null]}  [2]', '1  "a"'),
        (
            {
                "$ref": "x.json#/$defs/a",
                "$id": "https://h/s.json",
                "$defs": {"b": {"$id": "x.json", "$defs": {"a": {"const": 1}}}},
            },
            "1",
            "2",
        ),
        ({"$ref": "#here", "$defs": {"b": {"$anchor": "here", "const": 1}}}, "1", "2"),
        ({"$ref": "#/$defs/a%25b~1c", "$defs": {"a%b/c": {"const": 1}}}, "1", "2"),
    ],
)
def test_alternatives_conditions_and_references(schema: Any, admitted: str, refused: str) -> None:
    check(schema, admitted, refused)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems in the root"),
        ({"properties": {"Xyzzy": {"type": "rat"}}}, "type in a property"),
        ({"properties": {"Xyzzy": {"pattern": "(?<=a)b"}}}, "pattern in a property"),
        ({"items": {"minLength": -1}}, "minLength in an item"),
        ({"anyOf": [{"$ref": "#/$defs/Xyzzy"}]}, r"\$ref in an alternative"),
        ({"$defs": {"a": {"enum": 1}}, "$ref": "#/$defs/a"}, "enum in a definition"),
        ({"not": {"required": "Xyzzy"}}, "required in a condition"),
        ({"oneOf": [{}, {}]}, "no finite value"),
        ({"type": "string", "not": {"format": "date", "maxLength": 6}, "maxLength": 3}, r"not supported \(of format\)"),
        (
            {"$dynamicRef": "#n", "$dynamicAnchor": "n", "$defs": {"a": {"$id": "a", "$dynamicAnchor": "n"}}},
            r"\$dynamicRef in the root",
        ),
    ],
)
def test_a_refusal_names_the_keyword_and_its_place(schema: Any, words: str) -> None:
    with pytest.raises(StructureError, match=words) as refusal:
        grammar.of_json_schema(schema)
    assert "Xyzzy" not in str(refusal.value)


def test_schemas_that_say_the_same_share_their_rules() -> None:
    """Most properties of a schema are of few kinds, and each rule takes time to write and to compile."""
    one = {"type": "array", "items": {"type": "integer", "title": "first"}, "description": "one"}
    other = {"type": "array", "items": {"type": "integer", "default": 1}, "title": "other"}
    for same, lists in ((other, 1), (other | {"items": {"type": "number"}}, 2)):
        text = grammar.of_json_schema({"type": "object", "properties": {"a": one, "title": same}})
        assert json.loads(text)["grammars"][0]["lark_grammar"].count('"["') == lists
    base = {
        "$defs": {"x": {"const": 1}, "y": {"$id": "y", "$defs": {"x": {"const": 2}}, "items": {"$ref": "#/$defs/x"}}}
    }
    check(base | {"prefixItems": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]}, "[1, [2]]", "[1, [1]]  [2, [2]]")


def test_the_arguments_of_a_tool_are_an_object() -> None:
    def called(arguments: str) -> str:
        return f'{{"name": "f", "arguments": {arguments}}}'

    for bare in ({"type": "object"}, {"type": "object", "properties": {}}, {}, True):
        assert engine(of_arguments(bare)).is_accepting() is False
        assert admits(bare, called("{}"), of_arguments)
        assert not admits(bare, called('{"x": 1}'), of_arguments)
    assert admits({"type": ["object", "null"], "properties": {"a": {}}}, called('{"a": 1}'), of_arguments)
    assert not admits({"type": ["object", "null"]}, called("null"), of_arguments)
    assert admits({"additionalProperties": {"type": "integer"}}, called('{"x": 1}'), of_arguments)
    with pytest.raises(StructureError, match="are an object"):
        of_arguments({"type": "string"})


def test_values_and_names_are_no_schemas() -> None:
    values: dict[str, Any] = {"enum": [{"properties": {"a": 1}}], "default": NAMED}
    assert admits(values, json.dumps(values["enum"][0]))
    names = {"type": "object", "properties": {"properties": {"type": "integer"}, "$ref": {"const": 1}}}
    assert admits(names, '{"properties": 1, "$ref": 1}')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no finite value"),
        ({"type": "object", "properties": {"a": False}, "minProperties": 1}, "only the properties that it names"),
        (
            {"type": "object", "patternProperties": {"^a": False, "b": {"$ref": "#"}}, "minProperties": 1},
            "only the properties that it names",
        ),
        ({"type": "object", "not": {"enum": [{}, 1]}}, "its complement is not supported (of enum)"),
    ],
)
def test_a_schema_without_a_value_is_refused_for_its_reason(schema: Any, reason: str) -> None:
    with pytest.raises(StructureError, match=re.escape(reason)):
        grammar.of_json_schema(schema)
