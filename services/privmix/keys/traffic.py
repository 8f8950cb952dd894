"""Sums the traffic of all gateways for the console."""

import time
from collections import Counter, deque
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from privmix.keys.messages import TrafficUpdate

WINDOW_S = 10.0
HISTORY_S = 300
TIMELINE = 240


class TrafficReport(BaseModel):
    """Summarises the traffic of a service.

    Attributes:
        live, waiting: numbers of generations.
        tokens_per_second: the mean over the last `WINDOW_S` seconds.
        tokens_each_second: the last `HISTORY_S` seconds, oldest first.
        tokens_per_minute: tokens of the last minute.
        timeline: pairs of a Unix time and the number of tokens released until then, since the service started.
    """

    model_config = ConfigDict(frozen=True)

    live: int
    waiting: int
    tokens_per_second: float
    refusals: dict[str, int]
    tokens_each_second: list[int]
    tokens_per_minute: float
    timeline: list[tuple[float, int]]


class Traffic:
    """Sums the updates of all gateways. Keeps them in memory only. Not thread-safe: belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refusals: Counter[str] = Counter()
        self._live: dict[str, tuple[float, int]] = {}
        self._seconds: deque[tuple[int, int]] = deque(maxlen=HISTORY_S)
        self._tokens = 0
        self._timeline: list[tuple[float, int]] = [(time.time(), 0)]
        self._timeline_step_s = 1.0

    def add(self, gateway: str, update: TrafficUpdate) -> None:
        now = self._clock()
        self._refusals.update(update.refusals)
        self._live[gateway] = (now, update.live)
        self._tokens += update.tokens
        self._extend_timeline()
        if update.tokens:
            second, before = self._seconds.pop() if self._seconds else (int(now), 0)
            if second == int(now):
                self._seconds.append((second, before + update.tokens))
            else:
                self._seconds.extend([(second, before), (int(now), update.tokens)])

    def _extend_timeline(self) -> None:
        """Adds a point to the timeline. If it is full, drops every second point and doubles the step."""
        now = time.time()
        if now - self._timeline[-1][0] < self._timeline_step_s:
            return
        self._timeline.append((now, self._tokens))
        if len(self._timeline) > TIMELINE:
            self._timeline = self._timeline[::2]
            self._timeline_step_s *= 2

    def report(self, *, waiting: int) -> TrafficReport:
        """Returns the traffic of all gateways. `waiting`: the number of generations in the queue."""
        now = self._clock()
        by_second = dict(self._seconds)
        series = [by_second.get(second, 0) for second in range(int(now) - HISTORY_S + 1, int(now) + 1)]
        recent = series[-int(WINDOW_S) - 1 : -1]  # without the current second, which is incomplete
        return TrafficReport(
            live=sum(live for updated, live in self._live.values() if now - updated < WINDOW_S),
            waiting=waiting,
            tokens_per_second=sum(recent) / len(recent),
            refusals=dict(self._refusals),
            tokens_each_second=series,
            tokens_per_minute=sum(series[-61:-1]),
            timeline=[*self._timeline, (time.time(), self._tokens)],
        )
