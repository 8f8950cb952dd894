"""Counts what keys do at the same time at a gateway, so that one key leaves memory and places for the others."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from privmix.gateway.errors import limited

PLACES = 1024
"""The requests that a gateway serves at the same time. A waiting stream costs almost nothing, so there are many."""
RETRY_AFTER_S = 1.0


class Places:
    """The places for one kind of work, in all and of one key. `refusal` is the message and the code for want of one."""

    def __init__(self, most_of_key: int, most: int, refusal: tuple[str, str]) -> None:
        self._most_of_key = most_of_key
        self._most = most
        self._refusal = refusal
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, key: str) -> Iterator[None]:
        """Takes a place of a key.

        Raises:
            ApiError: 429, the key or all keys together have too many of them.
        """
        if self._taken[key] >= self._most_of_key or self._taken.total() >= self._most:
            raise limited(*self._refusal, RETRY_AFTER_S)
        self._taken[key] += 1
        try:
            yield
        finally:
            self._taken[key] -= 1
            self._taken += Counter()  # forgets keys without a place
