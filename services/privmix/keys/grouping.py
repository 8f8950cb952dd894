"""Runs the work of concurrent requests on the keys' database together, and gives up a database that hangs."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection

from privmix.database.service import ServiceDatabase
from privmix.foundation.errors import KeysUnavailable

MAX_GROUP = 256
DATABASE_TIMEOUT_S = 10.0
"""How long a caller waits for the database. The work itself continues, because it may be committed later."""

T = TypeVar("T")
Work = Callable[[Connection], T]


class GroupedTransactions:
    """Does work in the order of the calls: all that waits while one transaction runs shares the next one.

    Belongs to one event loop. The cancellation of a caller does not interrupt its work.
    """

    def __init__(self, database: ServiceDatabase) -> None:
        self._database = database
        self._waiting: deque[tuple[Work[Any], asyncio.Future[Any]]] = deque()
        self._running: asyncio.Task[None] | None = None

    async def run(self, work: Work[T]) -> T:
        """Returns the result of work, which is on disk.

        Raises:
            KeysUnavailable: the database failed, or does not answer in time; the work may still be done.
        """
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, outcome))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run_waiting())
        outcome.add_done_callback(_retrieve)
        try:
            async with asyncio.timeout(DATABASE_TIMEOUT_S):
                return await asyncio.shield(outcome)
        except TimeoutError:
            raise KeysUnavailable(f"the keys' database does not answer within {DATABASE_TIMEOUT_S:g} s") from None

    async def _run_waiting(self) -> None:
        while self._waiting:
            group = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_GROUP))]
            try:
                results = await asyncio.to_thread(self._transact, [work for work, _ in group])
            except Exception as error:
                for _, outcome in group:
                    outcome.set_exception(error)
                continue
            for (_, outcome), result in zip(group, results, strict=True):
                outcome.set_result(result)

    def _transact(self, works: list[Work[Any]]) -> list[Any]:
        with self._database.transaction() as connection:
            return [work(connection) for work in works]


def _retrieve(outcome: "asyncio.Future[Any]") -> None:
    """Retrieves the exception, so that asyncio does not log it when its caller has left."""
    if not outcome.cancelled():
        outcome.exception()
