"""Expands a template of prompts to the items of a job.

items("Urgency: {label}\\nCaller:", [{"label": "urgent", "count": 100}, {"label": "routine", "count": 100}])
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from privmix.foundation.errors import InputError
from privmix.foundation.json_lines import read_lines

COUNT = "count"
"""The field of a row with its number of texts; by default one."""
RESERVED = frozenset({"id", "text", "tokens", "finish_reason", "answered_by"})
"""The field names that the output reserves."""

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
        if not (prompt := template.format_map(fields)):
            raise InputError(f"template: the prompt of line {line} is empty")
        expanded += [Item(len(expanded) + number, fields, prompt) for number in range(count)]
    if not expanded:
        raise InputError("prompts: there are none; write one JSON object on each line")
    return expanded


def read_rows(path: Path) -> list[Fields]:
    """Reads the rows of a JSON Lines file of objects with plain values.

    Raises:
        InputError: the file or a line is invalid.
    """
    rows: list[Fields] = []
    for number, row in read_lines(path, "an object of fields", "prompts"):
        for name, value in row.items():
            if not isinstance(value, str | int | float | bool):
                raise InputError(f"prompts {path}: line {number}: {name}: must be text, a number, true or false")
        rows.append(row)
    return rows


def _names(template: str) -> list[str]:
    """Returns the field names in a template. Only plain names are valid, so a template cannot access attributes."""
    try:
        parsed = [field for _, *field in Formatter().parse(template) if field[0] is not None]
    except ValueError as error:
        raise InputError(f"template: {error}; write {{{{ and }}}} for braces") from error
    for name, specification, conversion in parsed:
        if not str(name).isidentifier() or specification or conversion:
            raise InputError(f"template: {{{name}}} is not a field name; write {{{{ and }}}} for braces")
    return [str(name) for name, *_ in parsed]
