"""Prints the steps of a long command on standard error, because standard output is for the result."""

import time

from rich.console import Console


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
