"""Repeats work that fails for a while: `await repeated(work, KeysUnavailable, 1.0)`."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def repeated(
    work: Callable[[], Awaitable[T]],
    kinds: type[Exception] | tuple[type[Exception], ...],
    pause_s: float,
    *,
    patience_s: float = math.inf,
    log: Callable[[Exception], object] = lambda error: None,
) -> T:
    """Returns the result of the first attempt that raises no error of these kinds.

    Args:
        pause_s: the seconds before each further attempt.
        patience_s: after this time, the next such error is raised.
        log: takes each error after which there is another attempt.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return await work()
        except kinds as error:
            if time.monotonic() > deadline:
                raise
            log(error)
        await asyncio.sleep(pause_s)
