"""Queues deltas for a gateway and hands them over in batches."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from privmix.coordinator.messages import Delta


class DeltaQueue:
    """Holds the unsent deltas of one gateway's channel. It has one reader."""

    def __init__(self) -> None:
        self._waiting: list[Delta] = []
        self._arrived = asyncio.Event()

    def put(self, deltas: Iterable[Delta]) -> None:
        self._waiting.extend(deltas)
        self._arrived.set()

    async def batches(self) -> AsyncIterator[list[Delta]]:
        """Yields, without end, all deltas that arrived since the previous batch."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._waiting = self._waiting, []
            yield batch
