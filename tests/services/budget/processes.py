"""Starts processes for tests to kill, fence or starve, forked from a server process that has the imports."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.services.budget.writers"])


def spawn(work: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Runs `work(connection, *arguments)` in a new process; returns it and our end of the connection."""
    ours, theirs = _context.Pipe()
    process = _context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def answer(work: Callable[..., None], *arguments: Any) -> Any:
    """Runs `work` in a new process and returns its message."""
    process, connection = spawn(work, *arguments)
    try:
        return connection.recv()
    finally:
        process.join()
