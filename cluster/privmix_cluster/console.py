"""Shows a command's result on standard output, and its steps and progress on standard error."""

import sys
import time

from rich.console import Console

from privmix.foundation.progress import Display

# Without a terminal, Rich uses 80 columns, which cuts the words of a wide table.
_COLUMNS = 160


def console() -> Console:
    """Returns a console on standard output, wide enough for tables if it is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else _COLUMNS)


def display() -> Display:
    """Returns a progress display on standard error."""
    return Display(Console(stderr=True))


class Steps:
    """Prints a line when a step begins, with the seconds since the first step."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def __call__(self, step: str) -> None:
        self._console.print(f"[dim]{self.seconds:6.1f} s[/]  {step}")
