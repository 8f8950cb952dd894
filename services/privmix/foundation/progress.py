"""Displays the progress of long work and its tasks, such as adapters, as bars on a terminal or as plain lines."""

from collections.abc import Mapping
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Display:
    """Shows nothing. Other displays extend it. Use it as a context manager."""

    def say(self, message: str) -> None:
        """Shows a line about the step that begins."""

    def show(self, tasks: Mapping[str, float]) -> None:
        """Shows the progress of all tasks. Their names map to the finished fractions, from 0 to 1."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


class LineDisplay(Display):
    """Prints a plain line for each step and for each finished task."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._finished: set[str] = set()

    def say(self, message: str) -> None:
        print(message, file=self._stream, flush=True)

    def show(self, tasks: Mapping[str, float]) -> None:
        for name, fraction in tasks.items():
            if fraction >= 1 and name not in self._finished:
                self._finished.add(name)
                self.say(f"{name} done ({len(self._finished & set(tasks))} of {len(tasks)})")


# With more tasks, finished bars are hidden, so that the moving bars stay on the screen.
_MAX_BARS = 16


class BarDisplay(Display):
    """Shows a bar for the whole work and one for each task that has started."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=console,
        )
        self._bars: dict[str, TaskID] = {}

    def say(self, message: str) -> None:
        self._progress.console.print(message)

    def show(self, tasks: Mapping[str, float]) -> None:
        self._set("total", sum(tasks.values()) / len(tasks))
        for name, fraction in tasks.items():
            if fraction == 1 and len(tasks) > _MAX_BARS:
                self._hide(name)
            elif fraction > 0:
                self._set(name, fraction)

    def _hide(self, name: str) -> None:
        if name in self._bars:
            self._progress.update(self._bars[name], visible=False)

    def _set(self, name: str, fraction: float) -> None:
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=1.0)
        self._progress.update(self._bars[name], completed=fraction)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
