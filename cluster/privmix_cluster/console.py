"""Creates the console for a command's result and the display of its progress."""

import sys

from rich.console import Console

from privmix.foundation.progress import BarDisplay, Display, LineDisplay

# Without a terminal, Rich uses 80 columns, which cuts the words of a wide table.
_COLUMNS = 160


def console() -> Console:
    """Returns a console on standard output, wide enough for tables if it is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else _COLUMNS)


def display(as_json: bool) -> Display:
    """Returns a progress display on standard error: bars on a terminal, otherwise plain lines."""
    if as_json or not sys.stderr.isatty():
        return LineDisplay(sys.stderr)
    return BarDisplay(Console(stderr=True))
