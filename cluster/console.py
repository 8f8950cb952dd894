"""Where a command shows its result, and how far it is."""

import sys

from rich.console import Console

from services.progress import BarDisplay, Display, LineDisplay

# Where there is no terminal, Rich takes 80 columns, and cuts the words of a wide table.
_COLUMNS = 160


def console() -> Console:
    """Standard output, with room for a table where it is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else _COLUMNS)


def display(as_json: bool) -> Display:
    """Standard error: bars on a terminal, plain lines where a program reads."""
    if as_json or not sys.stderr.isatty():
        return LineDisplay(sys.stderr)
    return BarDisplay(Console(stderr=True))
