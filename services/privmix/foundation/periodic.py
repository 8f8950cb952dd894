"""Does work again and again, without an end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from privmix.foundation.errors import loggable

logger = logging.getLogger(__name__)


async def periodically(work: Callable[[], Awaitable[object]], pause_s: float, failure: str) -> NoReturn:
    """Does `work` and pauses, until its task is cancelled. An error ends one round: nothing else would start the next.

    Args:
        failure: says in the log what could not be done.
    """
    while True:
        try:
            await work()
        except Exception as error:
            logger.error("%s: %s", failure, loggable(error))
        await asyncio.sleep(pause_s)
