"""Admits a request: charges the shares of its key, waits for capacity, and submits its generations."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import Context
from dataclasses import replace
from uuid import uuid4

from services.coordinator.messages import Delta, Generation
from services.gateway.coordinator_client import ResponseQueue
from services.gateway.keys import KeyService, rate_headers
from services.gateway.models import ServedModel
from services.keys.messages import Admitted, Identity

RETRY_S = 1.0


class Admission:
    """Admits one request to an ensemble and submits its generations.

    Attributes:
        headers: the rate limit headers of the response; known once the request is admitted.

    Args:
        background: let all other requests go first.
    """

    def __init__(self, served: ServedModel, keys: KeyService, identity: Identity, *, background: bool = False) -> None:
        self.headers: dict[str, str] = {}
        self._served = served
        self._client = served.client
        self._keys = keys
        self._identity = identity
        self._background = background
        self._arrived = time.monotonic()

    @asynccontextmanager
    async def submit(self, generations: Sequence[Generation]) -> AsyncIterator[ResponseQueue]:
        """Submits generations as `CoordinatorClient.submit` does, limited to the tokens that the key's share admits.

        A generation that the share truncates ends with the reason `share`.

        Raises:
            ApiError: nothing was started or charged.
        """
        submit = self._charged if self._identity.subjects else self._uncharged
        salt = self._keys.cache_salt(self._identity)
        with self._served.request():
            async with submit([replace(generation, cache_salt=salt) for generation in generations]) as queue:
                yield queue

    def _uncharged(self, generations: Sequence[Generation]) -> AbstractAsyncContextManager[ResponseQueue]:
        return self._client.submit(generations, arrived=self._arrived)

    @asynccontextmanager
    async def _charged(self, generations: Sequence[Generation]) -> AsyncIterator[ResponseQueue]:
        id_ = uuid4().hex
        wanted = sum(generation.max_tokens for generation in generations)
        admitting = asyncio.ensure_future(
            self._keys.admit(
                id_, self._identity, self._served.ensemble.admission_limits, wanted, len(generations), self._background
            )
        )
        try:
            admitted = await asyncio.shield(admitting)
        except asyncio.CancelledError:
            self._client.in_background(self._withdraw(id_, admitting))
            raise
        self.headers |= rate_headers(admitted.rates)
        limited = divide_tokens(generations, admitted.tokens)
        truncated = {
            after.id for before, after in zip(generations, limited, strict=True) if after.max_tokens < before.max_tokens
        }
        started = [generation for generation in limited if generation.max_tokens]
        later = [generation.id for generation in started[admitted.generations :]]

        async def settle(used: int | None) -> None:
            await self._keys.settle(id_, used)

        async with self._client.submit(
            started, arrived=self._arrived, truncated=frozenset(truncated), held_back=later, on_end=settle
        ) as queue:
            for generation in limited:
                if not generation.max_tokens:
                    queue.put(Delta(generation.id, "", (), "share"))
            async with self._in_pieces(id_, queue, later, admitted.generations, len(limited) - len(started)):
                yield queue

    @asynccontextmanager
    async def _in_pieces(
        self, id_: str, queue: ResponseQueue, later: Sequence[str], piece: int, never_started: int
    ) -> AsyncIterator[None]:
        """Starts the generations that do not fit in the first piece, as the service has places for them."""
        work = [self._enter(id_, queue, later, piece), self._leave(id_, queue, never_started)] if later else []
        tasks = [asyncio.create_task(task, context=Context()) for task in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _enter(self, id_: str, queue: ResponseQueue, later: Sequence[str], piece: int) -> None:
        for number in range(0, len(later), piece):
            ids = later[number : number + piece]
            while not await self._keys.enter(id_, len(ids)):
                await asyncio.sleep(RETRY_S)
            await self._client.start(queue, ids)

    async def _leave(self, id_: str, queue: ResponseQueue, left: int) -> None:
        """Gives the places of generations that have ended to other requests."""
        while not queue.finished:
            await queue.has_ended.wait()
            queue.has_ended.clear()
            ended, left = queue.ended - left, queue.ended
            await self._keys.leave(id_, ended)

    async def _withdraw(self, id_: str, admitting: asyncio.Future[Admitted]) -> None:
        """Withdraws a request whose client left while it waited for admission."""
        await self._keys.settle(id_, 0)
        await asyncio.wait([admitting])
        # The request may have been admitted at the same moment.
        await self._keys.settle(id_, 0)


def divide_tokens(generations: Sequence[Generation], tokens: int) -> list[Generation]:
    """Returns the generations with `tokens` divided among them as evenly as their own limits allow."""
    limits = [0] * len(generations)
    tokens_left = tokens
    by_limit = sorted(range(len(generations)), key=lambda index: generations[index].max_tokens)
    for generations_left, index in zip(range(len(generations), 0, -1), by_limit, strict=True):
        limits[index] = min(generations[index].max_tokens, tokens_left // generations_left)
        tokens_left -= limits[index]
    return [replace(generation, max_tokens=limit) for generation, limit in zip(generations, limits, strict=True)]
