"""Decides which request starts next while the service is full: the one whose key has the fewest live generations.

Background requests (batches) start after all others and leave half of the capacity free for them. While several keys
ask, none fills the capacity: another's next request would wait for a long answer to end.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

TIMES_FREE = 3
"""What a key may have live at most, as a multiple of what stays free: three quarters of the capacity for one key, and
a part of the rest for the next one (the dynamic thresholds of Choudhury and Hahne, IEEE/ACM ToN 6(2), 1998)."""
RECENT_S = 60.0
"""How long after its last request a key counts as one that asks."""


class QueueFull(Exception):  # noqa: N818 (the name says the state)
    """Too many generations already wait."""


@dataclass
class _KeyQueue:
    """Holds the requests of one key: the number of `live` generations, and the waiting requests in arrival order."""

    live: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)


@dataclass
class _PriorityClass:
    """Holds the requests of one priority class by key. At most `capacity` of its generations are live."""

    capacity: int
    keys: dict[str, _KeyQueue] = field(default_factory=dict)
    live: int = 0
    waiting: int = 0

    def remove_if_idle(self, key: str) -> None:
        queue = self.keys.get(key)
        if queue and not queue.live and not queue.waiting:
            del self.keys[key]


class FairQueue:
    """Limits the live generations to `capacity` and shares them fairly among keys.

    Free capacity goes to the waiting key with the fewest live generations; among equal keys, to the one that was served
    least recently. So a key with many requests gets what the others leave, and cannot fill the queue. If another key
    has asked lately, a key that has live generations may have at most `TIMES_FREE` times as many as stay free. A
    request larger than `capacity` runs alone. Not thread-safe: belongs to one event loop.

    Args:
        clock: returns seconds.
    """

    def __init__(
        self,
        capacity: int,
        max_waiting: int,
        max_waiting_of_key: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._last, self._last_of_others = ("", -RECENT_S), -RECENT_S
        self._capacity = capacity
        self._max_waiting = max_waiting
        self.max_waiting_of_key = max_waiting if max_waiting_of_key is None else max_waiting_of_key
        self._foreground = _PriorityClass(capacity)
        self._background = _PriorityClass(background_capacity(capacity))

    @property
    def live(self) -> int:
        """The number of live generations."""
        return self._foreground.live + self._background.live

    @property
    def waiting(self) -> int:
        """The number of waiting generations without background requests."""
        return self._foreground.waiting

    def restore(self, key: str, generations: int) -> None:
        """Counts generations that were live before this process started."""
        self._start(self._foreground, self._foreground.keys.setdefault(key, _KeyQueue()), generations)

    async def acquire(self, key: str, generations: int, *, background: bool = False, unlimited: bool = False) -> None:
        """Returns when the request may start. If it is cancelled, it holds no capacity.

        Args:
            unlimited: let it wait however many wait already, such as the rest of a request that has started.

        Raises:
            QueueFull: the request would have to wait, and too many of its key or of all keys already wait. Never raised
                for background requests.
        """
        class_ = self._class(background)
        queue = class_.keys.setdefault(key, _KeyQueue())
        if not background:
            self._note(key)
        if self._is_next(class_, queue) and self._fits(class_, key, generations):
            self._start(class_, queue, generations)
            return
        waiting_of_key = sum(waiting for waiting, _ in queue.waiting)
        too_many = (
            class_.waiting + generations > self._max_waiting or waiting_of_key + generations > self.max_waiting_of_key
        )
        if too_many and not (background or unlimited):
            class_.remove_if_idle(key)
            raise QueueFull
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.waiting.append((generations, started))
        class_.waiting += generations
        try:
            await started
        except asyncio.CancelledError:
            if not started.cancelled():
                self.free(key, generations, background=background)
            elif (generations, started) in queue.waiting:
                queue.waiting.remove((generations, started))
                class_.waiting -= generations
                class_.remove_if_idle(key)
                self._start_waiting()
            raise

    def free(self, key: str, generations: int, *, background: bool = False) -> None:
        """Frees the capacity of generations that have ended."""
        class_ = self._class(background)
        if queue := class_.keys.get(key):
            ended = min(generations, queue.live)
            queue.live -= ended
            class_.live -= ended
            class_.remove_if_idle(key)
            self._start_waiting()

    def _note(self, key: str) -> None:
        """Keeps when a key asked, and when another one did."""
        before, at = self._last
        if before != key:
            self._last_of_others = at
        self._last = key, self._clock()

    def _others_ask(self, key: str) -> bool:
        last, at = self._last
        return self._clock() - (self._last_of_others if last == key else at) < RECENT_S

    def _is_next(self, class_: _PriorityClass, queue: _KeyQueue) -> bool:
        """Tells whether no waiting request goes before one of this key."""
        if class_ is self._background:
            return not self._foreground.waiting and not class_.waiting
        return all(queue.live < other.live for other in class_.keys.values() if other.waiting)

    def _class(self, background: bool) -> _PriorityClass:
        return self._background if background else self._foreground

    def _start_waiting(self) -> None:
        """Starts the waiting requests for which there is capacity."""
        self._start_waiting_of(self._foreground)
        if not self._foreground.waiting:
            self._start_waiting_of(self._background)

    def _start_waiting_of(self, class_: _PriorityClass) -> None:
        while class_.waiting:
            waiting_keys = (key for key, queue in class_.keys.items() if queue.waiting)
            key = min(waiting_keys, key=lambda key: class_.keys[key].live)
            queue = class_.keys[key]
            generations, started = queue.waiting[0]
            if not started.cancelled() and not self._fits(class_, key, generations):
                return
            queue.waiting.popleft()
            class_.waiting -= generations
            if started.cancelled():
                class_.remove_if_idle(key)
                continue
            # Moves the key behind its equals, because insertion order breaks ties.
            class_.keys[key] = class_.keys.pop(key)
            self._start(class_, queue, generations)
            started.set_result(None)

    def _fits(self, class_: _PriorityClass, key: str, generations: int) -> bool:
        if self.live == 0:
            return True
        free = self._capacity - self.live - generations
        if free < 0 or class_.live + generations > class_.capacity:
            return False
        live = class_.keys[key].live
        is_limited = live and class_ is self._foreground and self._others_ask(key)
        return not is_limited or live + generations <= TIMES_FREE * free

    def _start(self, class_: _PriorityClass, queue: _KeyQueue, generations: int) -> None:
        queue.live += generations
        class_.live += generations


def background_capacity(capacity: int) -> int:
    """Returns how many background generations may be live, so that half of the capacity stays free for others."""
    return max(1, capacity // 2)
