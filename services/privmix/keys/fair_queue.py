"""Decides which request starts next while the service is full: the one whose key has the fewest live generations.

While several keys ask, none fills the capacity: another's next request would wait for a long answer to end.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from privmix.keys.messages import AdmissionLimits

TIMES_FREE = 3
"""What a key may have live at most, as a multiple of what stays free: three quarters of the capacity for one key, and
a part of the rest for the next one (the dynamic thresholds of Choudhury and Hahne, IEEE/ACM ToN 6(2), 1998)."""
RECENT_S = 60.0
"""How long after its last request a key counts as one that asks."""


@dataclass
class _KeyQueue:
    """Holds the number of `live` generations of a key, and its `waiting` requests with theirs in arrival order."""

    live: int = 0
    waiting: dict[asyncio.Future[None], int] = field(default_factory=dict)


class FairQueue:
    """Limits the live generations to the capacity and shares them fairly among keys.

    Free capacity goes to the waiting key with the fewest live generations; among equal keys, to the one that was served
    least recently. So a key with many requests gets what the others leave, and cannot fill the queue. If another key
    has asked lately, a key that has live generations may have at most `TIMES_FREE` times as many as stay free. Not
    thread-safe: belongs to one event loop.

    Args:
        clock: returns seconds.

    Attributes:
        limits: the limits of the service, which may change.
    """

    def __init__(self, limits: AdmissionLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._last, self._last_of_others = ("", -RECENT_S), -RECENT_S
        self._keys: dict[str, _KeyQueue] = {}  # the key that was served last is the last one

    @property
    def live(self) -> int:
        """The number of live generations."""
        return sum(queue.live for queue in self._keys.values())

    @property
    def waiting(self) -> int:
        """The number of waiting generations."""
        return sum(sum(queue.waiting.values()) for queue in self._keys.values())

    def restore(self, key: str, generations: int) -> None:
        """Counts generations that were live before this process started."""
        self._keys.setdefault(key, _KeyQueue()).live += generations

    async def acquire(self, key: str, generations: int) -> bool:
        """Returns True when the request may start; at once False if too many of its key or of all keys wait already.

        If it is cancelled, it holds no capacity.
        """
        self._note(key)
        started = asyncio.get_running_loop().create_future()
        self._keys.setdefault(key, _KeyQueue()).waiting[started] = generations
        self._start_waiting()
        if started.done():
            return True
        own = sum(self._keys[key].waiting.values())
        if self.waiting > self.limits.max_waiting or own > self.limits.max_waiting_of_key:
            started.cancel()
            self._start_waiting()
            return False
        try:
            await started
        except asyncio.CancelledError:
            if not started.cancelled():
                self.free(key, generations)
            self._start_waiting()
            raise
        return True

    def free(self, key: str, generations: int) -> None:
        """Frees the capacity of generations that have ended."""
        self._keys[key].live -= generations
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
        """Starts the waiting requests for which there is capacity. Forgets those that were cancelled, and idle keys."""
        for queue in self._keys.values():
            queue.waiting = {started: own for started, own in queue.waiting.items() if not started.cancelled()}
        self._keys = {key: queue for key, queue in self._keys.items() if queue.live or queue.waiting}
        while keys := [key for key, queue in self._keys.items() if queue.waiting]:
            key = min(keys, key=lambda key: self._keys[key].live)
            queue = self._keys[key]
            started, generations = next(iter(queue.waiting.items()))
            if not self._fits(key, generations):
                return
            del queue.waiting[started]
            queue.live += generations
            started.set_result(None)
            self._keys[key] = self._keys.pop(key)

    def _fits(self, key: str, generations: int) -> bool:
        live, own = self.live, self._keys[key].live
        free = self.limits.capacity - live - generations
        if not live:  # also if the capacity is less than it was
            return True
        return free >= 0 and (not own or not self._others_ask(key) or own + generations <= TIMES_FREE * free)
