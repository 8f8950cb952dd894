"""Translates JSON Schemas, regular expressions and choices to grammars of llguidance.

A grammar is a string: it travels with a generation, and two equal strings admit the same texts. JSON is written on one
line with one space after `:` and `,`, so that most of its punctuation is forced.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from privmix.structure.errors import StructureError, explained
from privmix.structure.limits import (
    CHOICE,
    MAX_CHOICES,
    VALUES,
    check_pattern,
    check_schema,
    check_size,
    engine_limits,
    nodes,
)

Schema = Mapping[str, Any] | bool
_ONE_LINE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
"""The engine's options: it refuses what it cannot follow, as it is not lenient. A client's own options are replaced."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values are schemas by names."""
_JOINING = {"$ref", "allOf", "anyOf", "oneOf"}


def of_json_schema(schema: Schema | str) -> str:
    """Returns the grammar of the JSON values of a schema, or of its JSON text, on one line.

    Raises:
        StructureError: the schema is too large, refers to another document, admits no value, or uses what the engine
            does not support.
    """
    parsed = _parsed(schema)
    check_schema(parsed)
    grammar, closed = _of_json(parsed), _closed(parsed)
    if closed == parsed:
        return grammar
    # oneOf may have alternatives that exclude each other only after they are closed.
    if error := LLMatcher.validate_grammar(grammar, limits=engine_limits(grammar)):
        raise StructureError(explained(error))
    return _of_json(closed)


def of_regex(pattern: str) -> str:
    """Returns the grammar of the texts that a regular expression matches as a whole.

    Raises:
        StructureError: the expression is too large.
    """
    check_size(pattern)
    check_pattern(pattern)
    return str(LLMatcher.grammar_from_regex(pattern))


def of_choice(choices: Sequence[str]) -> str:
    """Returns the grammar of a set of texts.

    Raises:
        StructureError: there are no or too many texts, or one of them is empty.
    """
    if not choices or not all(choices):
        raise StructureError("give at least one string, and no empty string")
    if len(choices) > MAX_CHOICES:
        raise StructureError(f"give at most {MAX_CHOICES} strings")
    check_size("".join(choices))
    # One terminal, which the lexer follows as one state, where a rule would have an item for each string. The escapes
    # of a literal are those of JSON.
    literals = " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(choices))
    return _of_lark(f"start: CHOICE\nCHOICE: {literals}", CHOICE)


def _parsed(schema: Schema | str) -> Mapping[str, Any]:
    """Returns a schema as an object. vLLM also accepts its JSON text."""
    if isinstance(schema, str):
        check_size(schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            schema = ""
    if schema is False:
        raise StructureError("the schema admits no value")
    if not isinstance(schema, dict | bool):
        raise StructureError("give a JSON Schema as an object or as its JSON text")
    return {} if isinstance(schema, bool) else schema


def _of_json(schema: Mapping[str, Any]) -> str:
    """Returns the grammar of the values of a schema."""
    try:
        text = json.dumps({**schema, "x-guidance": _ONE_LINE}, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a number that is not finite, or has thousands of digits
        raise StructureError("a number in the schema cannot be written as JSON") from None
    check_size(text)
    return _of_lark(f"start: %json {text}")


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema whose objects have no other properties than those that it names, where it does not say.

    What nobody asked for would be charged. A schema that joins objects, as with `allOf`, is returned as it is, because
    each of them admits the properties of the others.
    """
    return schema if any(_joins(node) for node in nodes(schema)) else _without_others(schema)


def _joins(node: Mapping[str, Any]) -> bool:
    joining = node.keys() & _JOINING
    several = isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1
    return several or len(joining) > 1 or bool(joining and "properties" in node)


def _without_others(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_others(item) for item in node]
    if not isinstance(node, dict):
        return node
    new: dict[str, Any] = {}
    for name, value in node.items():
        if name in _MAPS and isinstance(value, dict):
            new[name] = {key: _without_others(schema) for key, schema in value.items()}
        else:
            new[name] = value if name in VALUES else _without_others(value)
    named, required = node.get("properties"), node.get("required", [])
    silent = not node.keys() & {"additionalProperties", "patternProperties"}
    if (
        silent
        and named
        and isinstance(named, dict)
        and isinstance(required, list)
        and named.keys() >= {*map(str, required)}
    ):
        new["additionalProperties"] = False
    return new


def _of_lark(text: str, name: str | None = None) -> str:
    """Returns a grammar in the Lark format. A name tells the grammars apart that this module makes."""
    return json.dumps({"grammars": [{"name": name, "lark_grammar": text}]}, ensure_ascii=False)
