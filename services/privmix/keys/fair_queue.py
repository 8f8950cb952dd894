"""Decides which request starts next while the service is full: the one whose key has the fewest live generations.

While several keys ask, none fills the capacity: another's next request would wait for a long answer to end.
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
        self._keys: dict[str, _KeyQueue] = {}
        self.live = 0
        self.waiting = 0

    def restore(self, key: str, generations: int) -> None:
        """Counts generations that were live before this process started."""
        self._start(self._keys.setdefault(key, _KeyQueue()), generations)

    async def acquire(self, key: str, generations: int, *, unlimited: bool = False) -> None:
        """Returns when the request may start. If it is cancelled, it holds no capacity.

        Args:
            unlimited: let it wait however many wait already, such as the rest of a request that has started.

        Raises:
            QueueFull: the request would have to wait, and too many of its key or of all keys already wait.
        """
        self._note(key)
        queue = self._keys.setdefault(key, _KeyQueue())
        is_next = all(queue.live < other.live for other in self._keys.values() if other.waiting)
        if is_next and self._fits(key, generations):
            self._start(queue, generations)
            return
        waiting_of_key = sum(waiting for waiting, _ in queue.waiting)
        too_many = self.waiting + generations > self._max_waiting or (
            waiting_of_key + generations > self.max_waiting_of_key
        )
        if too_many and not unlimited:
            self._remove_if_idle(key)
            raise QueueFull
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.waiting.append((generations, started))
        self.waiting += generations
        try:
            await started
        except asyncio.CancelledError:
            if not started.cancelled():
                self.free(key, generations)
            elif (generations, started) in queue.waiting:
                queue.waiting.remove((generations, started))
                self.waiting -= generations
                self._remove_if_idle(key)
                self._start_waiting()
            raise

    def free(self, key: str, generations: int) -> None:
        """Frees the capacity of generations that have ended."""
        if queue := self._keys.get(key):
            ended = min(generations, queue.live)
            queue.live -= ended
            self.live -= ended
            self._remove_if_idle(key)
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

    def _start_waiting(self) -> None:
        """Starts the waiting requests for which there is capacity."""
        while self.waiting:
            waiting_keys = (key for key, queue in self._keys.items() if queue.waiting)
            key = min(waiting_keys, key=lambda key: self._keys[key].live)
            queue = self._keys[key]
            generations, started = queue.waiting[0]
            if not started.cancelled() and not self._fits(key, generations):
                return
            queue.waiting.popleft()
            self.waiting -= generations
            if started.cancelled():
                self._remove_if_idle(key)
                continue
            # Moves the key behind its equals, because insertion order breaks ties.
            self._keys[key] = self._keys.pop(key)
            self._start(queue, generations)
            started.set_result(None)

    def _fits(self, key: str, generations: int) -> bool:
        free = self._capacity - self.live - generations
        if self.live == 0 or free < 0:
            return self.live == 0
        live = self._keys[key].live
        return not live or not self._others_ask(key) or live + generations <= TIMES_FREE * free

    def _start(self, queue: _KeyQueue, generations: int) -> None:
        queue.live += generations
        self.live += generations

    def _remove_if_idle(self, key: str) -> None:
        queue = self._keys.get(key)
        if queue and not queue.live and not queue.waiting:
            del self._keys[key]
