"""Runs the operations of concurrent requests on the keys' database together, and gives up a database that hangs."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from privmix.database.deadline import in_time
from privmix.keys.store import KeyStore
from privmix.keys.transactions import Operation

MAX_GROUP = 256

T = TypeVar("T")


class GroupedTransactions:
    """Applies operations in the order of the calls: all that wait while one transaction runs share the next one.

    Belongs to one event loop. The cancellation of a caller does not interrupt its operation.
    """

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self._transaction = asyncio.Lock()
        self._waiting: deque[tuple[Operation, asyncio.Future[Any]]] = deque()
        self._running: asyncio.Task[None] | None = None

    async def run(self, operation: Operation) -> Any:
        """Returns the result of an operation, which is on disk.

        Raises:
            KeysUnavailable: the database failed, or does not answer in time; the operation may still be applied.
        """
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((operation, outcome))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run_waiting())
        return await in_time(outcome)

    async def alone(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which is a transaction of its own.

        Raises:
            KeysUnavailable: as in `run`.
        """

        async def exclusively() -> T:
            async with self._transaction:
                return await asyncio.to_thread(work)

        return await in_time(asyncio.ensure_future(exclusively()))

    async def _run_waiting(self) -> None:
        while self._waiting:
            async with self._transaction:
                group = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_GROUP))]
                operations = [operation for operation, _ in group]
                try:
                    results = await asyncio.to_thread(self._store.transact, operations)
                except Exception as error:
                    for _, outcome in group:
                        outcome.set_exception(error)
                    continue
            for (_, outcome), result in zip(group, results, strict=True):
                outcome.set_result(result)
