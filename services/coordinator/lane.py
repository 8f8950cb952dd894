"""Sequences that step together."""

import asyncio

from services.coordinator.sequence import Sequence


class Lane:
    """While the shards work for one lane's step, the mathematics of another's is done; `step` is held for its time."""

    def __init__(self) -> None:
        self.live: dict[str, Sequence] = {}
        self.step = asyncio.Lock()
        self.running: asyncio.Task[None] | None = None

    @property
    def rests(self) -> bool:
        """Whether there is something to do and nobody does it."""
        return bool(self.live) and (self.running is None or self.running.done())
