"""Limits the time that callers wait for the service's database, which can hang."""

import asyncio
from typing import Any, TypeVar

from privmix.foundation.errors import KeysUnavailable

DATABASE_TIMEOUT_S = 10.0
"""How long a caller waits for the database. The operation itself continues, because it may be committed later."""

T = TypeVar("T")


async def in_time(outcome: "asyncio.Future[T]") -> T:
    """Returns the outcome of an operation. The cancellation of a caller does not interrupt the operation.

    Raises:
        KeysUnavailable: the database does not answer in time.
    """
    outcome.add_done_callback(_retrieve)
    try:
        async with asyncio.timeout(DATABASE_TIMEOUT_S):
            return await asyncio.shield(outcome)
    except TimeoutError:
        raise KeysUnavailable(f"the service's database does not answer within {DATABASE_TIMEOUT_S:g} s") from None


def _retrieve(outcome: "asyncio.Future[Any]") -> None:
    """Retrieves the exception, so that asyncio does not log it when its caller has left."""
    if not outcome.cancelled():
        outcome.exception()
