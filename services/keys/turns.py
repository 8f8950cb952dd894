"""Whose request comes next when the service is full: that of the key with the fewest live generations.

Requests of the background (batches) come after all others, and leave half of the places free for these.
"""

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


@dataclass
class _Queue:
    """The lines of one class of requests, by key; at most `places` of its generations are live."""

    places: int
    lines: dict[str, _Line] = field(default_factory=dict)
    live: int = 0
    waiting: int = 0

    def forget(self, key: str) -> None:
        line = self.lines.get(key)
        if line and not line.live and not line.waiting:
            del self.lines[key]


class Turns:
    """Lets at most `capacity` generations be live, shared fairly among keys.

    A place that becomes free goes to the key with the fewest live generations; among equal keys to the one that has
    waited longest for a place. So a key that asks for everything gets what the others leave. Belongs to one event
    loop. A request larger than `capacity` runs alone.
    """

    def __init__(self, capacity: int, max_waiting: int) -> None:
        self._capacity = capacity
        self._max_waiting = max_waiting
        self._foreground = _Queue(capacity)
        self._background = _Queue(background_places(capacity))

    @property
    def live(self) -> int:
        return self._foreground.live + self._background.live

    @property
    def waiting(self) -> int:
        """Generations that wait, those of the background left out."""
        return self._foreground.waiting

    def restore(self, key: str, generations: int) -> None:
        """Count generations that were live before this process began."""
        self._begin(self._foreground, self._foreground.lines.setdefault(key, _Line()), generations)

    async def take(self, key: str, generations: int, *, background: bool = False) -> None:
        """Return when the request may begin. Being cancelled loses no place.

        Raises:
            QueueFull: it would have to wait, and too many wait already. The background waits without limit.
        """
        queue = self._queue(background)
        line = queue.lines.setdefault(key, _Line())
        if not self._foreground.waiting and not queue.waiting and self._fits(queue, generations):
            self._begin(queue, line, generations)
            return
        if not background and queue.waiting + generations > self._max_waiting:
            queue.forget(key)
            raise QueueFull
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiting.append((generations, turn))
        queue.waiting += generations
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back(key, generations, background=background)
            elif (generations, turn) in line.waiting:
                line.waiting.remove((generations, turn))
                queue.waiting -= generations
                queue.forget(key)
                self._call()
            raise

    def give_back(self, key: str, generations: int, *, background: bool = False) -> None:
        """The generations have ended."""
        queue = self._queue(background)
        if line := queue.lines.get(key):
            ended = min(generations, line.live)
            line.live -= ended
            queue.live -= ended
            queue.forget(key)
            self._call()

    def _queue(self, background: bool) -> _Queue:
        return self._background if background else self._foreground

    def _call(self) -> None:
        """Let those begin whose turn it is."""
        self._call_from(self._foreground)
        if not self._foreground.waiting:
            self._call_from(self._background)

    def _call_from(self, queue: _Queue) -> None:
        while queue.waiting:
            key = min((key for key, line in queue.lines.items() if line.waiting), key=lambda key: queue.lines[key].live)
            line = queue.lines[key]
            generations, turn = line.waiting[0]
            if not turn.cancelled() and not self._fits(queue, generations):
                return
            line.waiting.popleft()
            queue.waiting -= generations
            if turn.cancelled():
                queue.forget(key)
                continue
            # The last of its equals next time: insertion order breaks ties.
            queue.lines[key] = queue.lines.pop(key)
            self._begin(queue, line, generations)
            turn.set_result(None)

    def _fits(self, queue: _Queue, generations: int) -> bool:
        in_queue = queue.live + generations <= queue.places
        return self.live == 0 or (in_queue and self.live + generations <= self._capacity)

    def _begin(self, queue: _Queue, line: _Line, generations: int) -> None:
        line.live += generations
        queue.live += generations


def background_places(capacity: int) -> int:
    """How many generations of the background may be live: so many that others find half of the places free."""
    return max(1, capacity // 2)
