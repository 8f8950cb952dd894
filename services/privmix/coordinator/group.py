"""Asks the shards of one part group, with requests of a constant shape."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import TypeVar
from zlib import crc32

import numpy as np
import ray

from privmix.coordinator.copies import ShardCopies
from privmix.coordinator.step import Step
from privmix.engine.engine import PUBLIC, ZERO, ComingRow, Request
from privmix.fleet.shard_map import PartGroup
from privmix.foundation.errors import CoordinatorUnavailable
from privmix.privacy.protocol import Protocol
from privmix.shards.reducer import Reduction
from privmix.shards.shard import StepKey

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardBatch:
    """Holds the sequences of a step that prefer the same copies of every group.

    Attributes:
        step: of these sequences alone.
        places: of these sequences in the whole step, ascending.
        key: what the shards hold this batch under. A repeated step has another one.
        orders: the copies of each group, in the order in which they are called.
    """

    step: Step
    places: tuple[int, ...]
    key: StepKey
    orders: tuple[Sequence[int], ...]


def divided(groups: Sequence[Group], step: Step) -> list[ShardBatch]:
    """Divides the sequences of a step among the copies of the groups. Each call is a new attempt."""
    by_copies: dict[tuple[Sequence[int], ...], list[int]] = defaultdict(list)
    for place, sequence in enumerate(step.sequences):
        number = crc32(sequence.encode())
        by_copies[tuple(group.copies.order(number) for group in groups)].append(place)
    attempt = next(_attempts)
    return [
        ShardBatch(step.of(places), tuple(places), StepKey(_caller(), attempt, at), orders)
        for at, (orders, places) in enumerate(by_copies.items())
    ]


class Group:
    """Asks the copies of one part group, with a constant number of part rows a sequence.

    Attributes:
        models: the adapter of each model of the group.
        rows: the maximum number of rows of a sequence, with the public one.
    """

    def __init__(self, group: PartGroup, protocol: Protocol, copies: ShardCopies) -> None:
        self.copies = copies
        self.models = group.models
        self._protocol = protocol
        self._padding = None if protocol.rows is None else min(protocol.rows, len(group.models))
        self.rows = 1 + (len(group.models) if self._padding is None else self._padding)

    def requests(self, step: Step) -> list[Request]:
        """Returns what is asked of the group's engines for the sequences of a batch."""
        parts = [self._padded(draw) for draw in step.draws] + [()] * (len(step.sequences) - step.private)
        asked = zip(step.sequences, step.contexts, parts, step.cache_salts, strict=True)
        return [Request(sequence, context, (PUBLIC, *own), salt) for sequence, context, own, salt in asked]

    def coming(self, step: Step) -> tuple[ComingRow, ...]:
        """Returns the rows of the next steps: those of the next one come before those of the one after it."""
        return tuple(
            (sequence, name)
            for draws in zip(*step.coming, strict=True)
            for sequence, draw in zip(step.sequences, draws, strict=False)  # only private sequences have draws
            for name in self._padded(draw)
        )

    def reduction(self, step: Step) -> Reduction:
        """Says how a shard of this group reduces the rows of a batch."""
        drawn = np.zeros((step.private, self.rows - 1), dtype=np.bool_)
        allowances = None if step.allowances is None else np.zeros(drawn.shape, dtype=np.int64)
        for row, draw in enumerate(step.draws):
            own = self.drawn(draw)
            drawn[row, : len(own)] = True
            if allowances is not None and step.allowances is not None:
                allowances[row, : len(own)] = step.allowances[row, own]
        return Reduction(self._protocol, step.options, drawn, allowances)

    def drawn(self, draw: Sequence[int]) -> list[int]:
        """Returns the models of a draw that are in this group, in the order of their rows."""
        return [model for model in draw if model in self.models]

    def _padded(self, draw: Sequence[int]) -> tuple[str, ...]:
        """Returns the group's adapters in a draw, padded to a constant number."""
        drawn = tuple(self.models[model] for model in self.drawn(draw))
        return drawn if self._padding is None else drawn + (ZERO,) * (self._padding - len(drawn))


def in_order(answers: Iterable[tuple[ShardBatch, Iterable[T]]]) -> list[T]:
    """Returns the values of batches in the order of the whole step.

    Args:
        answers: with each batch one value for each of its sequences, or for each private one: they come first.
    """
    placed = {place: value for batch, values in answers for place, value in zip(batch.places, values, strict=False)}
    return [placed[place] for place in sorted(placed)]


@asynccontextmanager
async def asking(timeout_s: float) -> AsyncIterator[None]:
    """Limits how long the shards may take.

    Raises:
        CoordinatorUnavailable: they did not answer in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise CoordinatorUnavailable(f"the ensemble did not answer within {timeout_s:g} s") from error


@cache
def _caller() -> str:
    """Names this process to the shards."""
    return str(ray.get_runtime_context().get_worker_id())


_attempts = count(1)
