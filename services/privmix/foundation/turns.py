"""Shares work that takes long between clients: one turn at a time for each, and some at once for all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class Turns:
    """Gives turns. A client that asks for many waits for its own, and for at most one of each other client.

    Args:
        count: the maximum number of turns at once.
    """

    def __init__(self, count: int) -> None:
        self._all = asyncio.Semaphore(count)
        self._own: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Waits for a turn, which lasts until the context exits."""
        own = self._own.get(client)
        if own is None:
            own = self._own[client] = asyncio.Lock()
        async with own, self._all:
            yield
