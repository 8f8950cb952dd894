"""Limits requests and tokens per minute with token buckets."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Literal

from privmix.keys.messages import RateState, RateStates, Refused
from privmix.keys.records import Share

MINUTE_S = 60.0
ROUNDING = 1e-6
"""Tolerance for rounding errors of floating-point sums."""

RateKind = Literal["requests_per_minute", "tokens_per_minute"]


class TokenBucket:
    """Holds at most `limit` units, refills evenly by `limit` units per minute, and starts full."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._level = float(limit)
        self._refilled = clock()

    def wait_s(self, amount: int) -> float:
        """Returns the seconds until `amount` can be taken; infinite if it exceeds the limit."""
        self._refill()
        if amount > self.limit:
            return math.inf
        missing = amount - self._level
        return missing * MINUTE_S / self.limit if missing > ROUNDING else 0.0

    def take(self, amount: int) -> None:
        """Takes `amount`. The caller has checked that `wait_s` is 0."""
        self._level -= amount

    def put_back(self, amount: int) -> None:
        """Returns units that were taken and not used."""
        self._refill()
        self._level = min(float(self.limit), self._level + amount)

    def state(self) -> RateState:
        """Returns the limit, the rest, and the seconds until the bucket is full."""
        self._refill()
        seconds = (self.limit - self._level) * MINUTE_S / self.limit
        return RateState(self.limit, max(0, math.floor(self._level + ROUNDING)), seconds)

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(float(self.limit), self._level + (now - self._refilled) * self.limit / MINUTE_S)
        self._refilled = now


class TokenBuckets:
    """Holds a bucket of the same limit for each key that has taken from it lately."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}

    def wait_s(self, key: str) -> float:
        """Returns the seconds until the key can take one unit."""
        bucket = self._buckets.get(key)
        return 0.0 if bucket is None else bucket.wait_s(1)

    def take(self, key: str) -> None:
        """Takes one unit, also if none is left: then the key waits longer. Forgets keys whose buckets are full."""
        self._buckets = {other: bucket for other, bucket in self._buckets.items() if bucket.state().reset_s > 0}
        bucket = self._buckets.setdefault(key, TokenBucket(self.limit, self._clock))
        bucket.take(1)


class RateLimiter:
    """Holds the token buckets of all shares. A request takes from the buckets of all its shares or from none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, RateKind], TokenBucket] = {}
        self._taken: dict[str, tuple[list[TokenBucket], int]] = {}

    def take(self, id_: str, shares: Mapping[str, Share], tokens: int) -> Refused | None:
        """Takes one request and its `tokens`, or refuses the request. `end` with the same id corrects the tokens."""
        requests, by_token = self._of(shares, "requests_per_minute"), self._of(shares, "tokens_per_minute")
        amounts = [(bucket, 1) for bucket in requests] + [(bucket, tokens) for bucket in by_token]
        waits = [(bucket.wait_s(amount), bucket) for bucket, amount in amounts]
        longest, narrowest = max(waits, key=lambda wait: wait[0], default=(0.0, None))
        if narrowest is not None and longest > 0:
            kind: RateKind = "requests_per_minute" if narrowest in requests else "tokens_per_minute"
            return Refused(kind, narrowest.limit, longest, self.states(shares))
        for bucket, amount in amounts:
            bucket.take(amount)
        if by_token:
            self._taken[id_] = (by_token, tokens)
        return None

    def put_back(self, id_: str, tokens: int) -> None:
        """Returns `tokens` of a request that was admitted with fewer tokens than it requested."""
        if id_ in self._taken:
            buckets, taken = self._taken[id_]
            for bucket in buckets:
                bucket.put_back(tokens)
            self._taken[id_] = (buckets, taken - tokens)

    def end(self, id_: str, used: int) -> None:
        """Ends a request and returns the tokens that it did not use."""
        buckets, taken = self._taken.pop(id_, ([], 0))
        for bucket in buckets:
            bucket.put_back(taken - used)

    def states(self, shares: Mapping[str, Share]) -> RateStates:
        """Returns the states of the buckets of these shares with the least left."""
        return RateStates(
            _narrowest(self._of(shares, "requests_per_minute")), _narrowest(self._of(shares, "tokens_per_minute"))
        )

    def _of(self, shares: Mapping[str, Share], kind: RateKind) -> list[TokenBucket]:
        limits = {subject: getattr(share, kind) for subject, share in shares.items()}
        return [self._bucket(subject, kind, limit) for subject, limit in limits.items() if limit is not None]

    def _bucket(self, subject: str, kind: RateKind, limit: int) -> TokenBucket:
        bucket = self._buckets.get((subject, kind))
        if bucket is None or bucket.limit != limit:
            bucket = self._buckets[subject, kind] = TokenBucket(limit, self._clock)
        return bucket


def _narrowest(buckets: list[TokenBucket]) -> RateState | None:
    return min((bucket.state() for bucket in buckets), key=lambda state: state.remaining, default=None)
