"""Requests and tokens a minute: buckets that refill evenly."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Literal

from services.keys.messages import RateState, RateStates, Refused
from services.keys.records import Share

MINUTE_S = 60.0
ROUNDING = 1e-6
"""What floating-point sums may be short of a whole."""

Kind = Literal["requests_per_minute", "tokens_per_minute"]
Clock = Callable[[], float]


class Bucket:
    """Holds at most `limit`, refilled by `limit` a minute; starts full."""

    def __init__(self, limit: int, clock: Clock = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._level = float(limit)
        self._at = clock()

    def wait_s(self, amount: int) -> float:
        """Seconds until `amount` can be taken; infinite where it is more than the bucket ever holds."""
        self._refill()
        if amount > self.limit:
            return math.inf
        missing = amount - self._level
        return missing * MINUTE_S / self.limit if missing > ROUNDING else 0.0

    def take(self, amount: int) -> None:
        """Take `amount`, for which there is no wait."""
        self._level -= amount

    def put_back(self, amount: int) -> None:
        """Return what was taken and not used."""
        self._refill()
        self._level = min(float(self.limit), self._level + amount)

    def state(self) -> RateState:
        self._refill()
        seconds = (self.limit - self._level) * MINUTE_S / self.limit
        return RateState(self.limit, max(0, math.floor(self._level + ROUNDING)), seconds)

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(float(self.limit), self._level + (now - self._at) * self.limit / MINUTE_S)
        self._at = now


class Rates:
    """The buckets of all shares. A request takes from all of its shares or from none."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, Kind], Bucket] = {}
        self._taken: dict[str, tuple[list[Bucket], int]] = {}

    def take(self, id_: str, shares: Mapping[str, Share], tokens: int) -> Refused | None:
        """Take one request and its `tokens`, to be corrected by `end` under the same id; or say when to come again."""
        requests, by_token = self._of(shares, "requests_per_minute"), self._of(shares, "tokens_per_minute")
        amounts = [(bucket, 1) for bucket in requests] + [(bucket, tokens) for bucket in by_token]
        waits = [(bucket.wait_s(amount), bucket) for bucket, amount in amounts]
        longest, narrowest = max(waits, key=lambda wait: wait[0], default=(0.0, None))
        if narrowest is not None and longest > 0:
            kind: Kind = "requests_per_minute" if narrowest in requests else "tokens_per_minute"
            return Refused(kind, narrowest.limit, longest, self.states(shares))
        for bucket, amount in amounts:
            bucket.take(amount)
        if by_token:
            self._taken[id_] = (by_token, tokens)
        return None

    def put_back(self, id_: str, tokens: int) -> None:
        """The request was admitted with so many tokens fewer."""
        if id_ in self._taken:
            buckets, taken = self._taken[id_]
            for bucket in buckets:
                bucket.put_back(tokens)
            self._taken[id_] = (buckets, taken - tokens)

    def end(self, id_: str, used: int) -> None:
        """The request has ended after `used` tokens."""
        buckets, taken = self._taken.pop(id_, ([], 0))
        for bucket in buckets:
            bucket.put_back(taken - used)

    def states(self, shares: Mapping[str, Share]) -> RateStates:
        """What the narrowest buckets of these shares hold."""
        return RateStates(
            _narrowest(self._of(shares, "requests_per_minute")), _narrowest(self._of(shares, "tokens_per_minute"))
        )

    def _of(self, shares: Mapping[str, Share], kind: Kind) -> list[Bucket]:
        limits = {subject: getattr(share, kind) for subject, share in shares.items()}
        return [self._bucket(subject, kind, limit) for subject, limit in limits.items() if limit is not None]

    def _bucket(self, subject: str, kind: Kind, limit: int) -> Bucket:
        bucket = self._buckets.get((subject, kind))
        if bucket is None or bucket.limit != limit:
            bucket = self._buckets[subject, kind] = Bucket(limit, self._clock)
        return bucket


def _narrowest(buckets: list[Bucket]) -> RateState | None:
    return min((bucket.state() for bucket in buckets), key=lambda state: state.remaining, default=None)
