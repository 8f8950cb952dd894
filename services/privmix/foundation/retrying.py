"""Repeats work that fails for a while.

    batch = await repeated(lambda: asyncio.to_thread(read), KeysUnavailable, pauses(1.0, 60.0))

Only errors of the named kinds are followed by another attempt.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
Kinds = type[Exception] | tuple[type[Exception], ...]
Log = Callable[[Exception], object]


def pauses(first_s: float, longest_s: float | None = None) -> Iterator[float]:
    """Yields the seconds before each further attempt, which double up to `longest_s`; without it, they are equal."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, first_s if longest_s is None else longest_s)


async def repeated(
    work: Callable[[], Awaitable[T]],
    kinds: Kinds,
    waits: Iterator[float],
    *,
    patience_s: float = math.inf,
    log: Log = lambda error: None,
) -> T:
    """Returns the result of the first attempt that raises no error of these kinds.

    Args:
        waits: the seconds before each further attempt.
        patience_s: after this time, the next such error is raised.
        log: takes each error after which there is another attempt.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return await work()
        except kinds as error:
            wait_s = _wait_after(error, deadline, waits, log)
        await asyncio.sleep(wait_s)


def repeated_in_thread(
    work: Callable[[], T],
    kinds: Kinds,
    waits: Iterator[float],
    *,
    patience_s: float = math.inf,
    log: Log = lambda error: None,
) -> T:
    """Does the same as `repeated` with work that blocks this thread."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return work()
        except kinds as error:
            wait_s = _wait_after(error, deadline, waits, log)
        time.sleep(wait_s)


def _wait_after(error: Exception, deadline: float, waits: Iterator[float], log: Log) -> float:
    """Returns the seconds before the attempt that follows an error. Raises the error after the deadline."""
    if time.monotonic() > deadline:
        raise error
    log(error)
    return next(waits)
