"""Displays the steps of long work and the progress of its tasks, such as adapters."""

from collections.abc import Mapping

from rich.console import Console
from rich.progress import Progress


class Display(Progress):
    """Shows each step and each finished task as a line, and on a terminal one bar of the whole. A context manager.

    Args:
        console: where they are shown; None shows nothing.
    """

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(quiet=True)
        super().__init__(console=console, disable=not console.is_terminal)
        self._finished: set[str] = set()

    def start(self) -> None:
        self._finished.clear()
        super().start()

    def say(self, message: str) -> None:
        """Shows a line about the step that begins."""
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def show(self, tasks: Mapping[str, float]) -> None:
        """Shows the progress of all tasks. Their names map to the finished fractions, from 0 to 1."""
        for name in (name for name, fraction in tasks.items() if fraction >= 1 and name not in self._finished):
            self._finished.add(name)
            self.say(f"{name} done ({len(self._finished & tasks.keys())} of {len(tasks)})")
        bar = self.task_ids[0] if self.task_ids else self.add_task("total")
        self.update(bar, total=len(tasks), completed=sum(tasks.values()))
