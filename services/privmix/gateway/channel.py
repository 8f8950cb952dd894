"""Keeps a connection to a coordinator open, and submits generations through it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from uuid import uuid4

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from privmix.coordinator.messages import Delta, Generation
from privmix.foundation.actors import find_actor

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 1.0
BEAT_S = 1.0
SILENT_S = 30.0
"""A coordinator that does not answer for this long is considered lost."""
# Ray closes the coordinator's end of the stream after the death of this process only if there is such a limit. Without
# it, the coordinator would continue for a dead gateway and charge tokens that nobody receives. While the limit is
# reached, the batches grow.
UNREAD_BATCHES = 16


class Channel:
    """Connects to a coordinator by its actor's name, and reconnects whenever the connection is lost.

    Args:
        on_deltas: called with the deltas of every step.
        on_loss: called when the connection is lost. Deltas of earlier submissions do not arrive afterwards.

    Attributes:
        load: the last known number of generations that the coordinator has.
    """

    def __init__(
        self,
        namespace: str,
        actor: str,
        on_deltas: Callable[[Sequence[Delta]], None],
        on_loss: Callable[["Channel"], None],
    ) -> None:
        self.actor = actor
        self.load = 0
        self._namespace = namespace
        self._on_deltas = on_deltas
        self._on_loss = on_loss
        self._coordinator: ActorHandle | None = None
        self._name = ""

    @property
    def open(self) -> bool:
        """Whether the coordinator answers."""
        return self._coordinator is not None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keeps the channel open until the context exits."""
        task = asyncio.create_task(self._keep_open())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def submit(self, generations: Sequence[Generation]) -> "Submission":
        """Submits generations to the coordinator. The channel must be open."""
        assert self._coordinator is not None
        self.load += len(generations)
        return Submission(self._coordinator, self._name, generations)

    async def _keep_open(self) -> None:
        pause = FIRST_RETRY_S
        name = uuid4().hex
        for attempt in count():
            # Each connection has a new name, so that deltas for a broken connection do not reach the next one.
            self._name = f"{name}-{attempt}"
            try:
                async with asyncio.TaskGroup() as tasks:
                    coordinator = await find_actor(self.actor, self._namespace)
                    tasks.create_task(self._read(coordinator))
                    tasks.create_task(self._follow_load(coordinator))
            except* Exception as errors:
                logger.warning("the channel to %s is broken: %s", self.actor, type(errors.exceptions[0]).__name__)
            finally:
                pause = FIRST_RETRY_S if self.open else min(2 * pause, LONGEST_RETRY_S)
                self._coordinator = None
                self._on_loss(self)
            await asyncio.sleep(pause)

    async def _read(self, coordinator: ActorHandle) -> None:
        events = coordinator.events.options(_generator_backpressure_num_objects=UNREAD_BATCHES).remote(self._name)
        try:
            async for batch in events:
                self._on_deltas(await batch)
        finally:
            if ray.is_initialized():
                ray.cancel(events, recursive=False)
        raise ConnectionError("the coordinator ended the channel")

    async def _follow_load(self, coordinator: ActorHandle) -> None:
        """Polls the load, which also shows whether the coordinator answers."""
        while True:
            async with asyncio.timeout(SILENT_S):
                self.load = await coordinator.load.remote()
            self._coordinator = coordinator
            await asyncio.sleep(BEAT_S)


class Submission:
    """Represents generations that were sent to a coordinator. They start even if nothing awaits `accepted`."""

    def __init__(self, coordinator: ActorHandle, channel: str, generations: Sequence[Generation]) -> None:
        self._coordinator = coordinator
        self._call: asyncio.Future[None] = asyncio.ensure_future(coordinator.submit.remote(channel, list(generations)))

    async def accepted(self) -> None:
        """Returns once the generations have started.

        Raises:
            CoordinatorError: the coordinator refused them; none has started.
            ray.exceptions.RayError, TimeoutError: it is unknown whether they have started.
        """
        async with asyncio.timeout(SILENT_S):
            await asyncio.shield(self._call)

    async def cancel(self, ids: Sequence[str]) -> None:
        """Cancels generations after their submission, because Ray may reorder calls to an async actor."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SILENT_S):
                await asyncio.wait([self._call])  # A failed call may have been executed, so cancel after it too.
                with suppress(RayError):
                    await self._coordinator.cancel.remote(list(ids))
