"""Waits for conditions, however long a busy machine takes."""

import asyncio
import time
from collections.abc import Callable


def until(true: Callable[[], object], seconds: float, said: Callable[[], object] = str, pause_s: float = 0.05) -> None:
    """Waits until a condition holds.

    Raises:
        TimeoutError: it does not hold in time; with what `said` returns.
    """
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(str(said())[-4000:])
        time.sleep(pause_s)


async def becoming(true: Callable[[], object]) -> None:
    """Waits beside other tasks until a condition holds. Raises TimeoutError after two minutes."""
    async with asyncio.timeout(120):
        while not true():
            await asyncio.sleep(0.01)
