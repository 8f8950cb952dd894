"""Translates JSON Schemas, regular expressions and choices to grammars of llguidance.

A grammar is a string: it travels with a generation, and two equal strings admit the same texts. JSON is written on one
line with one space after `:` and `,`, so that most of its punctuation is forced.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from llguidance import LLMatcher

from privmix.structure.errors import StructureError
from privmix.structure.limits import MAX_CHOICES, check_schema, check_size, without_unreachable
from privmix.structure.schema_grammar import rules_of

_CHOICE = "choice"

Schema = Mapping[str, Any] | bool
ANY_OBJECT: Schema = {"type": "object"}

StructureKind = Literal["json", "regex", "choice", "tools", "text_or_tools"]
"""The ways in which a client describes an answer."""


def of_kind(kind: StructureKind, described: Any) -> str:
    """Returns the grammar of a description, which is what the function of its kind takes.

    Raises:
        StructureError: see that function.
    """
    functions: Mapping[StructureKind, Callable[[Any], str]] = {
        "json": lambda schema: of_json_schema(_parsed(schema)),
        "regex": of_regex,
        "choice": of_choice,
        "tools": of_tool_call,
        "text_or_tools": of_text_or_tool_call,
    }
    return functions[kind](described)


def of_json_schema(schema: Schema) -> str:
    """Returns the grammar of the JSON values of a schema, on one line (see `schema_grammar`).

    Raises:
        StructureError: the schema is too large, refers to another document, admits no finite value, or uses what is not
            supported.
    """
    return _of_lark(_rules(schema, "start"))


def of_regex(pattern: str) -> str:
    """Returns the grammar of the texts that a regular expression matches as a whole.

    Raises:
        StructureError: the expression is too large.
    """
    check_size(pattern)
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
    # One terminal, which the lexer follows as one state, where a rule would have an item for each string.
    terminal = f"start: CHOICE\nCHOICE: {' | '.join(map(_quoted, dict.fromkeys(choices)))}"
    return _of_lark(terminal, _CHOICE)


def is_choice(grammar: str) -> bool:
    """Tells whether `of_choice` made a grammar. Clients write the texts of grammars, and not their names."""
    return any(part.get("name") == _CHOICE for part in json.loads(grammar)["grammars"])


def of_tool_call(tools: Mapping[str, Schema]) -> str:
    """Returns the grammar of one call, `{"name": NAME, "arguments": OBJECT}`, of one of several tools.

    A tool whose schema names no property has the arguments `{}`.

    Args:
        tools: the schemas of the arguments, by the name of the tool.

    Raises:
        StructureError: there is no tool, or a schema is not accepted (see `of_json_schema`).
    """
    return _of_lark(_tool_call(tools))


def of_text_or_tool_call(tools: Mapping[str, Schema]) -> str:
    """Returns the grammar of a call (see `of_tool_call`) or of a text, which does not begin with a brace."""
    return _of_lark(f"{_tool_call(tools)}\n  | TEXT?\nTEXT: /[^{{](.|\\n)*/")


def _tool_call(tools: Mapping[str, Schema]) -> str:
    """Returns the rules of one call in the Lark format; those of its start are last, so that more can follow."""
    if not tools:
        raise StructureError("give at least one tool")
    calls = [f'{_quoted(call_prefix(name))} arguments_{index} "}}"' for index, name in enumerate(tools)]
    rules = [_rules(schema, f"arguments_{index}", arguments=True) for index, schema in enumerate(tools.values())]
    return "\n".join([*rules, "start: " + " | ".join(calls)])


def call_prefix(name: str) -> str:
    """Returns the text of a tool call up to its arguments."""
    return f'{{"name": {json.dumps(name)}, "arguments": '


def _parsed(schema: Schema | str) -> Schema:
    """Returns a schema, which vLLM also accepts as JSON text."""
    if not isinstance(schema, str):
        return schema
    check_size(schema)
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict | bool):
        raise StructureError("give a JSON Schema as an object or as its JSON text")
    return parsed


def _rules(schema: Schema, start: str, arguments: bool = False) -> str:
    """Returns the rules of a schema that passed the checks (see `rules_of`)."""
    if isinstance(schema, bool):
        if not schema:
            raise StructureError("the schema admits no value")
        schema = {}
    check_schema(schema)
    reached: Mapping[str, Any] = without_unreachable(schema)
    try:
        text = json.dumps(reached, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a number that is not finite, or has thousands of digits
        raise StructureError("a number in the schema cannot be written as JSON") from None
    check_size(text)
    return rules_of(reached, start, arguments)


def _of_lark(text: str, name: str | None = None) -> str:
    """Returns a grammar in the Lark format. A name tells the grammars apart that this module makes."""
    return json.dumps({"grammars": [{"name": name, "lark_grammar": text}]}, ensure_ascii=False)


def _quoted(text: str) -> str:
    """Returns a string literal of the Lark format, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)
