"""One gateway's channel to one coordinator: every gateway reads one stream of deltas for all its requests there.

Ray spends some tens of microseconds per item of a stream, so one item a step for all requests is what keeps many
concurrent streams cheap.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from uuid import uuid4

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from services.coordinator.messages import Delta, Generation

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 1.0
BEAT_S = 1.0
SILENT_S = 30.0
"""A coordinator that has not answered for this long is taken for lost."""
# Only with a limit does Ray close the coordinator's end when this process dies; without one it would read on for a
# dead gateway, and tokens that nobody receives would be charged. Batches grow while the limit is reached.
UNREAD_BATCHES = 16


class Channel:
    """Finds the coordinator by its actor's name, again whenever it is lost.

    Args:
        heard: is given the deltas of every step.
        lost: is called when deltas may be lost; nothing submitted before is heard of again.

    Attributes:
        load: how many generations the coordinator has, as far as is known here.
    """

    def __init__(
        self, namespace: str, actor: str, heard: Callable[[Sequence[Delta]], None], lost: Callable[["Channel"], None]
    ) -> None:
        self.actor = actor
        self.load = 0
        self._namespace = namespace
        self._heard = heard
        self._lost = lost
        self._coordinator: ActorHandle | None = None
        self._name = ""

    @property
    def open(self) -> bool:
        """Whether the coordinator answers."""
        return self._coordinator is not None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the channel open for the time of the context."""
        keeper = asyncio.create_task(self._keep_open())
        try:
            yield
        finally:
            keeper.cancel()
            with suppress(asyncio.CancelledError):
                await keeper

    def submit(self, generations: Sequence[Generation]) -> "Submission":
        """Submit generations to the coordinator of this moment; the channel must be open."""
        assert self._coordinator is not None
        self.load += len(generations)
        return Submission(self._coordinator, self._name, generations)

    async def _keep_open(self) -> None:
        pause = FIRST_RETRY_S
        name = uuid4().hex
        for attempt in count():
            # A channel has its own name each time, so that nothing meant for a broken one reaches its successor.
            self._name = f"{name}-{attempt}"
            try:
                async with asyncio.TaskGroup() as tasks:
                    coordinator = await self._find()
                    tasks.create_task(self._read(coordinator))
                    tasks.create_task(self._follow_load(coordinator))
            except* Exception as errors:
                logger.warning("the channel to %s is broken: %s", self.actor, type(errors.exceptions[0]).__name__)
            finally:
                pause = FIRST_RETRY_S if self.open else min(2 * pause, LONGEST_RETRY_S)
                self._coordinator = None
                self._lost(self)
            await asyncio.sleep(pause)

    async def _find(self) -> ActorHandle:
        # ray.get_actor would start a cluster of its own.
        if not ray.is_initialized():
            raise RuntimeError("Ray is not initialised")
        return await asyncio.to_thread(ray.get_actor, self.actor, self._namespace)

    async def _read(self, coordinator: ActorHandle) -> None:
        events = coordinator.events.options(_generator_backpressure_num_objects=UNREAD_BATCHES).remote(self._name)
        try:
            async for batch in events:
                self._heard(await batch)
        finally:
            if ray.is_initialized():
                ray.cancel(events, recursive=False)
        raise ConnectionError("the coordinator ended the channel")

    async def _follow_load(self, coordinator: ActorHandle) -> None:
        """Ask for the load for ever; this also shows whether the coordinator answers."""
        while True:
            async with asyncio.timeout(SILENT_S):
                self.load = await coordinator.load.remote()
            self._coordinator = coordinator
            await asyncio.sleep(BEAT_S)


class Submission:
    """Generations on their way to one coordinator; they begin whether or not somebody waits."""

    def __init__(self, coordinator: ActorHandle, channel: str, generations: Sequence[Generation]) -> None:
        self._coordinator = coordinator
        self._call: asyncio.Future[None] = asyncio.ensure_future(coordinator.submit.remote(channel, list(generations)))

    async def accepted(self) -> None:
        """Return once the generations have begun.

        Raises:
            CoordinatorError: they were refused, and none has begun.
            ray.exceptions.RayError, TimeoutError: nobody knows.
        """
        async with asyncio.timeout(SILENT_S):
            await asyncio.shield(self._call)

    async def cancel(self, ids: Sequence[str]) -> None:
        """Cancel what was submitted, once it was: Ray may run calls to an async actor in another order than made."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SILENT_S):
                await asyncio.wait([self._call])  # also one that failed may have been carried out
                with suppress(RayError):
                    await self._coordinator.cancel.remote(list(ids))
