"""Compares what two neighbouring corpora make, where only one part may differ."""

from collections.abc import Iterator
from typing import Any


def unequal(first: Any, second: Any, place: str = "") -> Iterator[str]:
    """Yields what differs between two views, as sentences."""
    match first, second:
        case dict(), dict():
            for name in sorted(first.keys() | second.keys()):
                yield from unequal(first.get(name), second.get(name), f"{place}/{name}")
        case [*ones], [*others] if len(ones) == len(others):
            for number, (one, other) in enumerate(zip(ones, others, strict=True)):
                yield from unequal(one, other, f"{place}/{number}")
        case _ if first != second:
            yield f"{place}: {str(first)[:80]!r} without the user, {str(second)[:80]!r} with"
