"""What waits to be sent to a gateway: everything of a step in one batch."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from services.coordinator.messages import Delta


class DeltaQueue:
    """One gateway's channel, filled by the coordinator's steps and emptied by the one call that reads it."""

    def __init__(self) -> None:
        self._waiting: list[Delta] = []
        self._arrived = asyncio.Event()

    def put(self, deltas: Iterable[Delta]) -> None:
        self._waiting.extend(deltas)
        self._arrived.set()

    async def batches(self) -> AsyncIterator[list[Delta]]:
        """Whatever has gathered since the batch before, for ever."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._waiting = self._waiting, []
            yield batch
