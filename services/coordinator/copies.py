"""One block of parts as the coordinator asks it: any of its copies, another where one does not answer."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from ray.actor import ActorHandle
from ray.exceptions import RayError

from services.engine.engine import Request

AVOIDED_S = 30.0
"""How long a copy that was slow or failed is asked last."""


class Copies:
    """Actors that hold the same models. A sequence keeps to its copy, where its caches are, while that answers."""

    def __init__(self, shards: Sequence[ActorHandle], patience_s: float) -> None:
        self._shards = tuple(shards)
        self._patience_s = patience_s
        self._avoided = dict.fromkeys(range(len(self._shards)), 0.0)

    def choice(self, number: int) -> tuple[int, ...]:
        """The copies in the order in which a sequence of this number asks them."""
        order = [(number + step) % len(self._shards) for step in range(len(self._shards))]
        now = time.monotonic()
        return tuple(sorted(order, key=lambda copy: self._avoided[copy] > now))

    async def next_token(
        self, order: Sequence[int], requests: Sequence[Request], trace: str | None = None
    ) -> np.ndarray:
        """The rows, float32 [rows, V], from the first copy that answers; the next is asked when one is slow or fails.

        Raises:
            RayError: every copy failed.
        """
        calls: list[asyncio.Task[np.ndarray]] = []
        try:
            for position, copy in enumerate(order):
                calls.append(asyncio.create_task(self._ask(copy, requests, trace)))
                last = position == len(order) - 1
                answered = await _first(calls, None if last else self._patience_s)
                if answered is not None:
                    return answered
                self._avoided[copy] = time.monotonic() + AVOIDED_S
            return calls[-1].result()  # raises what the last one raised
        finally:
            for call in calls:
                call.cancel()

    def release(self, sequences: Sequence[str]) -> None:
        for shard in self._shards:
            shard.release.remote(sequences)

    async def resident_bytes(self) -> list[int]:
        return [status.resident_bytes for status in await asyncio.gather(*(s.status.remote() for s in self._shards))]

    async def _ask(self, copy: int, requests: Sequence[Request], trace: str | None) -> np.ndarray:
        rows: np.ndarray = await self._shards[copy].next_token.remote(requests, trace)
        return rows


async def _first(calls: Sequence[asyncio.Task[np.ndarray]], timeout_s: float | None) -> np.ndarray | None:
    """The first answer within the time; None when there is none, or every call has failed."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    waiting = set(calls)
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for call in done:
            with suppress(RayError):
                return call.result()
        if not done:
            return None
    return None
