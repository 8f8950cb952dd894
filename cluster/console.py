"""Where a command shows its result."""

import sys

from rich.console import Console

# Where there is no terminal, Rich takes 80 columns, and cuts the words of a wide table.
_COLUMNS = 160


def console() -> Console:
    """Standard output, with room for a table where it is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else _COLUMNS)
