"""How one request enters: charged to its key's shares, in its turn, with as many tokens as it was granted."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from uuid import uuid4

from services.coordinator.messages import Delta, Generation
from services.gateway.hub import Mailbox
from services.gateway.keys import KeyService, rate_headers
from services.gateway.served import Served
from services.keys.messages import Admitted, Identity


class Entrance:
    """Submits the generations of one request to an ensemble; `headers` are for its answer, known once it was admitted.

    One of the `background` lets all others go before.
    """

    def __init__(self, served: Served, keys: KeyService, identity: Identity, *, background: bool = False) -> None:
        self.headers: dict[str, str] = {}
        self._served = served
        self._hub = served.hub
        self._keys = keys
        self._identity = identity
        self._background = background
        self._arrived = time.monotonic()

    @asynccontextmanager
    async def submit(self, generations: Sequence[Generation]) -> AsyncIterator[Mailbox]:
        """As `Hub.submit`, of as much as the key's share pays for; what it does not pay for ends with `share`.

        Raises:
            ApiError: nothing was started, and nothing is charged.
        """
        submit = self._charged if self._identity.subjects else self._uncharged
        with self._served.request():
            async with submit(generations) as mailbox:
                yield mailbox

    def _uncharged(self, generations: Sequence[Generation]) -> AbstractAsyncContextManager[Mailbox]:
        return self._hub.submit(generations, since=self._arrived)

    @asynccontextmanager
    async def _charged(self, generations: Sequence[Generation]) -> AsyncIterator[Mailbox]:
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
            self._hub.in_background(self._give_up(id_, admitting))
            raise
        self.headers |= rate_headers(admitted.rates)
        paid = share_out(generations, admitted.tokens)
        cut = {given.id for asked, given in zip(generations, paid, strict=True) if given.max_tokens < asked.max_tokens}
        begun = [generation for generation in paid if generation.max_tokens]

        async def settle(used: int | None) -> None:
            await self._keys.settle(id_, used)

        async with self._hub.submit(begun, since=self._arrived, cut=frozenset(cut), ended=settle) as mailbox:
            for generation in paid:
                if not generation.max_tokens:
                    mailbox.put(Delta(generation.id, "", (), "share"))
            yield mailbox

    async def _give_up(self, id_: str, admitting: asyncio.Future[Admitted]) -> None:
        """The client left while the request waited."""
        await self._keys.settle(id_, 0)
        await asyncio.wait([admitting])
        # It may have been admitted at the same moment.
        await self._keys.settle(id_, 0)


def share_out(generations: Sequence[Generation], tokens: int) -> list[Generation]:
    """The generations with `tokens` among them, as evenly as their own limits allow."""
    limits = [0] * len(generations)
    left = tokens
    by_limit = sorted(range(len(generations)), key=lambda index: generations[index].max_tokens)
    for behind, index in zip(range(len(generations), 0, -1), by_limit, strict=True):
        limits[index] = min(generations[index].max_tokens, left // behind)
        left -= limits[index]
    return [replace(generation, max_tokens=limit) for generation, limit in zip(generations, limits, strict=True)]
