"""How far a long work is: one display for all its tasks, such as adapters, on a terminal or in plain lines."""

from collections.abc import Mapping
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Display:
    """A display that shows nothing; the others extend it. Used as a context manager."""

    def say(self, message: str) -> None:
        """One line about the step that begins."""

    def show(self, tasks: Mapping[str, float]) -> None:
        """The fraction done, 0 to 1, of every task, by its name."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


class LineDisplay(Display):
    """Plain lines: one for each step, one for each finished task."""

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


# More finished bars than this would push those that move off the screen.
_BARS = 16


class BarDisplay(Display):
    """A bar for everything, and one for each task from when it starts; where tasks are many, until it ends."""

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
        self._set("everything", sum(tasks.values()) / len(tasks))
        for name, fraction in tasks.items():
            if fraction == 1 and len(tasks) > _BARS:
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
