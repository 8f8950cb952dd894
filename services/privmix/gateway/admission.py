"""Admits a request within its key's share, and submits its generations."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from uuid import uuid4

from privmix.coordinator.messages import Delta, Generation
from privmix.gateway.keys import KeyService
from privmix.gateway.response_queue import ResponseQueue
from privmix.gateway.served_model import ServedModel
from privmix.keys.messages import Identity


@asynccontextmanager
async def admitted(
    served: ServedModel,
    keys: KeyService,
    identity: Identity,
    generations: Sequence[Generation],
    identify: Callable[[], Awaitable[Identity]],
) -> AsyncIterator[ResponseQueue]:
    """Submits generations as `CoordinatorClient.submit` does, limited to the tokens that the key's share admits.

    A generation that the share truncates ends with the reason `share`.

    Args:
        identify: see `KeyService.admit`.

    Raises:
        ApiError: nothing was started or charged.
    """
    salt = keys.cache_salt(identity)
    generations = [replace(generation, cache_salt=salt) for generation in generations]
    if not identity.charged:
        async with served.client.submit(generations) as queue:
            yield queue
        return
    id_ = uuid4().hex
    wanted = sum(generation.max_tokens for generation in generations)
    limits = served.ensemble.admission_limits
    tokens = (await keys.admit(id_, identity, limits, wanted, len(generations), identify)).tokens
    limited = divide_tokens(generations, tokens)
    started = [generation for generation in limited if generation.max_charged != 0]
    truncated = frozenset(generation.id for generation in limited if generation.max_charged is not None)
    async with served.client.submit(started, truncated=truncated, on_end=partial(keys.settle, id_)) as queue:
        for generation in limited:
            if generation.max_charged == 0:
                queue.put(Delta(generation.id, "", (), "share"))
        yield queue


def divide_tokens(generations: Sequence[Generation], tokens: int) -> list[Generation]:
    """Returns the generations with `tokens` divided among them as evenly as their own limits allow.

    One that gets fewer than its limit may charge no more, and goes on with free tokens.
    """
    limits = [0] * len(generations)
    tokens_left = tokens
    by_limit = sorted(range(len(generations)), key=lambda index: generations[index].max_tokens)
    for generations_left, index in zip(range(len(generations), 0, -1), by_limit, strict=True):
        limits[index] = min(generations[index].max_tokens, tokens_left // generations_left)
        tokens_left -= limits[index]
    return [
        generation if limit == generation.max_tokens else replace(generation, max_charged=limit)
        for generation, limit in zip(generations, limits, strict=True)
    ]
