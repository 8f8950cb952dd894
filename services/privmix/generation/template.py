"""Expands a template of prompts to the items of a job, and reads the schema of its records.

items("Urgency: {label}\\nCaller:", [{"label": "urgent", "count": 100}, {"label": "routine", "count": 100}])
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from privmix.foundation.errors import InputError
from privmix.foundation.json_lines import read_lines

COUNT = "count"
"""The field of a row with its number of texts; by default one."""
LABEL = "label"
DEFAULT = "Label: {label}\nText:"
"""The default template of labels."""
RESERVED = frozenset({"id", "text", "tokens", "finish_reason", "answered_by"})
"""The field names that the output reserves."""
MAX_ITEMS = 1_000_000

Fields = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class Item:
    """Describes one text to generate: its number in the job, the fields of its row, and its prompt."""

    index: int
    fields: Fields
    prompt: str


def items(template: str, rows: Iterable[Fields]) -> list[Item]:
    """Returns the items of all rows, in order. A row with `count` yields that number of items.

    Args:
        template: a prompt with field names in braces; `{{` and `}}` are literal braces.

    Raises:
        InputError: the template or a row is invalid. The message names the line, counted from 1.
    """
    names = _names(template)
    expanded: list[Item] = []
    for line, row in enumerate(rows, start=1):
        fields = {name: value for name, value in row.items() if name != COUNT}
        count = row.get(COUNT, 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"prompts: line {line}: {COUNT}: must be a whole number above 0")
        if taken := sorted(RESERVED & fields.keys()):
            raise InputError(f"prompts: line {line}: {taken[0]}: the output has a field of this name; rename it")
        if missing := [name for name in names if name not in fields]:
            known = ", ".join(fields) or "none"
            raise InputError(f"template: line {line} of the prompts has no field {missing[0]!r}; it has {known}")
        if len(expanded) + count > MAX_ITEMS:
            raise InputError(f"prompts: line {line}: more than {MAX_ITEMS:,} items in one job; make several jobs")
        prompt = template.format_map(fields)
        if not prompt:
            raise InputError(f"template: the prompt of line {line} is empty")
        expanded += [Item(len(expanded) + number, fields, prompt) for number in range(count)]
    if not expanded:
        raise InputError("prompts: there are none; give a file with --prompts, or --label NAME=COUNT")
    return expanded


def read_rows(path: Path) -> list[Fields]:
    """Reads the rows of a JSON Lines file of objects with plain values.

    Raises:
        InputError: the file or a line is invalid.
    """
    return list(_rows(path))


def parse_labels(texts: Sequence[str]) -> list[Fields]:
    """Parses `NAME=COUNT` into rows.

    Raises:
        InputError: a text has another form.
    """
    rows: list[Fields] = []
    for text in texts:
        name, equals, count = text.rpartition("=")
        if not (equals and name.strip() and count.isascii() and count.isdecimal() and int(count) > 0):
            raise InputError(f"label: {text!r} must be NAME=COUNT with a count above 0, such as urgent=100")
        rows.append({LABEL: name.strip(), COUNT: int(count)})
    if len({row[LABEL] for row in rows}) < len(rows):
        raise InputError("label: a label is given twice; give it once, with the sum of the counts")
    return rows


def read_schema(path: Path) -> dict[str, Any]:
    """Reads a JSON Schema of an object.

    Raises:
        InputError: the file cannot be read or is not JSON, or the schema does not describe an object with properties.
    """
    try:
        schema = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"schema {path}: cannot be read as JSON: {error}") from error
    if not isinstance(schema, dict) or schema.get("type") != "object" or not isinstance(schema.get("properties"), dict):
        raise InputError(f"schema {path}: must describe an object: give the type object, and its properties")
    return schema


def _rows(path: Path) -> Iterator[Fields]:
    for number, row in read_lines(path, "an object of fields", "prompts"):
        for name, value in row.items():
            if not isinstance(value, str | int | float | bool):
                raise InputError(f"prompts {path}: line {number}: {name}: must be text, a number, true or false")
        yield row


def _names(template: str) -> list[str]:
    """Returns the field names in a template. Only plain names are valid, so a template cannot access attributes."""
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise InputError(f"template: {error}; write {{{{ and }}}} for braces") from error
    names = []
    for _, name, specification, conversion in parsed:
        if name is None:
            continue
        if not name.isidentifier() or specification or conversion:
            raise InputError(f"template: {{{name}}} is not a field name; write {{{{ and }}}} for braces")
        names.append(name)
    return names
