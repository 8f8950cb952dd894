"""Waits until what is read has come to rest."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def at_rest(read: Callable[[], T]) -> T:
    """Returns what is read, once two readings two seconds apart are equal."""
    before = None
    while before != (now := read()):
        before = now
        await asyncio.sleep(2)
    return now
