"""Prints rows of names and values as a table."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from privmix_cluster.console import console

Rows = Sequence[Mapping[str, Any]]


def show_table(title: str, rows: Rows) -> None:
    """Prints a table whose columns are the names in all rows, the first one aligned to the left."""
    table = Table(title=title, title_justify="left")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    console().print(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "unbounded"
    return "-" if value is None else escape(str(value))
