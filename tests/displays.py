"""A display that records its messages and tasks."""

from collections.abc import Mapping

from privmix.foundation.progress import Display


class Recorder(Display):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.shown: set[str] = set()

    def say(self, message: str) -> None:
        self.said.append(message)

    def show(self, tasks: Mapping[str, float]) -> None:
        self.shown |= tasks.keys()
