"""What the gateways have seen lately, added up for the console."""

import time
from collections import Counter, deque
from collections.abc import Callable
from statistics import median

from pydantic import BaseModel, ConfigDict

from services.keys.messages import Flow, Pulse

WINDOW_S = 10.0
HISTORY_S = 300
FIRST_TOKENS = 200
TIMELINE = 240


class TrafficReport(BaseModel):
    """Rates are means over the last `WINDOW_S` seconds, times the median and the worst of the last requests.

    `tokens_each_second` has the last `HISTORY_S` seconds, the latest last; `timeline` the tokens released until each of
    some moments (Unix seconds) since the service started.
    """

    model_config = ConfigDict(frozen=True)

    live: int
    waiting: int
    requests: int
    tokens: int
    tokens_per_second: float
    first_token_s: float | None
    first_token_worst_s: float | None
    refusals: dict[str, int]
    tokens_each_second: list[int]
    tokens_per_minute: float
    timeline: list[tuple[float, int]]
    gateways: int


class Traffic:
    """Adds up pulses. Belongs to one event loop; forgets everything when its process ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._together = _Stream(clock)
        self._ensembles: dict[str, _Stream] = {}
        self._refusals: Counter[str] = Counter()
        self._requests = 0

    def add(self, gateway: str, seen: Pulse) -> None:
        self._requests += seen.requests
        self._refusals.update(seen.refusals)
        for ensemble, flow in seen.flows.items():
            self._ensembles.setdefault(ensemble, _Stream(self._clock)).add(gateway, flow)
        flows = seen.flows.values()
        times = [seconds for flow in flows for seconds in flow.first_token_s]
        self._together.add(gateway, Flow(sum(flow.live for flow in flows), sum(flow.tokens for flow in flows), times))

    def report(self, ensemble: str | None = None, *, waiting: int) -> TrafficReport:
        """Of one ensemble, or of all together; requests and refusals are of all together either way."""
        stream = self._together if ensemble is None else self._ensembles.get(ensemble) or _Stream(self._clock)
        return stream.report(waiting, self._requests, dict(self._refusals))


class _Stream:
    """The tokens of one ensemble, or of all."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[str, tuple[float, int]] = {}
        self._seconds: deque[tuple[int, int]] = deque(maxlen=HISTORY_S)
        self._first_tokens: deque[float] = deque(maxlen=FIRST_TOKENS)
        self._tokens = 0
        self._timeline: list[tuple[float, int]] = [(time.time(), 0)]
        self._apart_s = 1.0

    def add(self, gateway: str, seen: Flow) -> None:
        now = self._clock()
        self._live[gateway] = (now, seen.live)
        self._tokens += seen.tokens
        self._first_tokens.extend(seen.first_token_s)
        self._note()
        if seen.tokens:
            second, before = self._seconds.pop() if self._seconds else (int(now), 0)
            if second == int(now):
                self._seconds.append((second, before + seen.tokens))
            else:
                self._seconds.extend([(second, before), (int(now), seen.tokens)])

    def _note(self) -> None:
        """Add a moment to the timeline; of a full one drop every second moment, so that it covers all time."""
        now = time.time()
        if now - self._timeline[-1][0] < self._apart_s:
            return
        self._timeline.append((now, self._tokens))
        if len(self._timeline) > TIMELINE:
            self._timeline = self._timeline[::2]
            self._apart_s *= 2

    def report(self, waiting: int, requests: int, refusals: dict[str, int]) -> TrafficReport:
        now = self._clock()
        here = [live for at, live in self._live.values() if now - at < WINDOW_S]
        by_second = dict(self._seconds)
        series = [by_second.get(second, 0) for second in range(int(now) - HISTORY_S + 1, int(now) + 1)]
        recent = series[-int(WINDOW_S) - 1 : -1]  # the present second is not over
        return TrafficReport(
            live=sum(here),
            waiting=waiting,
            requests=requests,
            tokens=self._tokens,
            tokens_per_second=sum(recent) / len(recent),
            first_token_s=median(self._first_tokens) if self._first_tokens else None,
            first_token_worst_s=max(self._first_tokens, default=None),
            refusals=refusals,
            tokens_each_second=series,
            tokens_per_minute=sum(series[-61:-1]),
            timeline=[*self._timeline, (time.time(), self._tokens)],
            gateways=len(here),
        )
