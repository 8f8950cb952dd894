"""Whose request comes next when the service is full: that of the key with the fewest live generations."""

import asyncio
from collections import deque
from dataclasses import dataclass, field


class QueueFull(Exception):  # noqa: N818 (the name says the state)
    """Too many generations wait already."""


@dataclass
class _Line:
    """One key's requests: `live` generations, and those that wait in the order of their arrival."""

    live: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)


class Turns:
    """Lets at most `capacity` generations be live, shared fairly among keys.

    A place that becomes free goes to the key with the fewest live generations; among equal keys to the one that has
    waited longest for a place. So a key that asks for everything gets what the others leave. Belongs to one event
    loop. A request larger than `capacity` runs alone.
    """

    def __init__(self, capacity: int, max_waiting: int) -> None:
        self._capacity = capacity
        self._max_waiting = max_waiting
        self._lines: dict[str, _Line] = {}
        self._live = 0
        self._waiting = 0

    @property
    def live(self) -> int:
        return self._live

    @property
    def waiting(self) -> int:
        return self._waiting

    def live_of(self, key: str) -> int:
        """Generations of this key that are live or wait."""
        line = self._lines.get(key)
        return 0 if line is None else line.live + sum(size for size, _ in line.waiting)

    def restore(self, key: str, generations: int) -> None:
        """Count generations that were live before this process began."""
        self._lines.setdefault(key, _Line()).live += generations
        self._live += generations

    async def take(self, key: str, generations: int) -> None:
        """Return when the request may begin. Being cancelled loses no place.

        Raises:
            QueueFull: it would have to wait, and too many wait already.
        """
        line = self._lines.setdefault(key, _Line())
        if not self._waiting and self._fits(generations):
            self._begin(line, generations)
            return
        if self._waiting + generations > self._max_waiting:
            self._forget(key)
            raise QueueFull
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiting.append((generations, turn))
        self._waiting += generations
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back(key, generations)
            elif (generations, turn) in line.waiting:
                line.waiting.remove((generations, turn))
                self._waiting -= generations
                self._forget(key)
                self._call()
            raise

    def give_back(self, key: str, generations: int) -> None:
        """The generations have ended."""
        if line := self._lines.get(key):
            ended = min(generations, line.live)
            line.live -= ended
            self._live -= ended
            self._forget(key)
            self._call()

    def _call(self) -> None:
        """Let those begin whose turn it is."""
        while self._waiting:
            key = min((key for key, line in self._lines.items() if line.waiting), key=lambda key: self._lines[key].live)
            line = self._lines[key]
            generations, turn = line.waiting[0]
            if not turn.cancelled() and not self._fits(generations):
                return
            line.waiting.popleft()
            self._waiting -= generations
            if turn.cancelled():
                self._forget(key)
                continue
            # The last of its equals next time: insertion order breaks ties.
            self._lines[key] = self._lines.pop(key)
            self._begin(line, generations)
            turn.set_result(None)

    def _fits(self, generations: int) -> bool:
        return self._live == 0 or self._live + generations <= self._capacity

    def _begin(self, line: _Line, generations: int) -> None:
        line.live += generations
        self._live += generations

    def _forget(self, key: str) -> None:
        line = self._lines.get(key)
        if line and not line.live and not line.waiting:
            del self._lines[key]
