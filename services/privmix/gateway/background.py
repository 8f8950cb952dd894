"""Runs work that outlives the request that began it."""

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any


class Background:
    """Starts tasks, and holds them until they end: the event loop itself has only weak references to tasks."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work in a new context, because Ray cancels what a cancelled call called."""
        task = asyncio.create_task(work, context=Context())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
