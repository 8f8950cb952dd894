"""Asks the shards of one part group, with requests of a constant shape."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray

from privmix.coordinator.copies import ShardCopies, Told
from privmix.coordinator.step import Step, Tokens
from privmix.fleet.shard_map import PartGroup
from privmix.foundation.errors import CoordinatorUnavailable
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocol import Protocol
from privmix.shards.sessions import NOBODY, Asked, StepKey, Terms

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
        length = step.lengths[place]
        picked = length if length > len(step.contexts[place]) else 0
        by_copies[tuple(group.copies.order(sequence, picked) for group in groups)].append(place)
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
        picking: the sequences of the latest step of which its shards pick tokens, and these, by place.
    """

    picking: tuple[Sequence[str], Awaitable[Tokens]] | None = None

    def __init__(self, group: PartGroup, protocol: Protocol, copies: ShardCopies) -> None:
        self.copies = copies
        self.models = group.models
        self._protocol = protocol
        self._padding = None if protocol.rows is None else min(protocol.rows, len(group.models))
        self.rows = 1 + (len(group.models) if self._padding is None else self._padding)

    def asked(self, key: StepKey, step: Step, told: Told, *, picked: Mapping[str, int] = MappingProxyType({})) -> Asked:
        """Returns what a copy is asked for a batch, from what it was told, and notes what it is told now.

        Args:
            picked: tokens of sequences that `step.contexts` may lack.

        Raises:
            CoordinatorUnavailable: it lacks a token that is not known here yet.
        """
        known, news = list[int](), list[int]()
        changed = dict[int, tuple[str | None, SamplingOptions]]()
        contexts = zip(step.sequences, step.contexts, step.lengths, strict=True)
        for place, (sequence, context, length) in enumerate(contexts):
            before, options = told.contexts.get(sequence, (0, None))
            known.append(before)
            news += context[before:length]
            if before < length > len(context):
                if sequence not in picked:
                    raise CoordinatorUnavailable("a copy lacks a token that is being picked")
                news.append(picked[sequence])
            if step.options[place] is not options:
                changed[place] = step.cache_salts[place], step.options[place]
            told.contexts[sequence] = length, step.options[place]
        terms, told.terms = None if told.terms else Terms(self._protocol, self.models), True
        drawn = self._padded(step.draws)
        allowances = None
        if step.allowances is not None:
            own = step.allowances[np.arange(len(drawn))[:, None], drawn]
            allowances = np.where(drawn == NOBODY, 0, own)
        return Asked(
            key,
            step.sequences,
            np.array(known, dtype=np.int32),
            np.array(step.lengths, dtype=np.int32),
            np.array(news, dtype=np.int32),
            changed,
            drawn,
            allowances,
            terms,
        )

    async def picked(self, step: Step) -> Mapping[str, int]:
        """Waits for the tokens of these sequences that its shards pick, if contexts lack any. Returns them by sequence.

        Raises: see `StepResult.sample`.
        """
        known = all(map(int.__le__, step.lengths, map(len, step.contexts)))
        if known or self.picking is None:
            return {}
        sequences, picking = self.picking
        tokens = await asyncio.shield(picking)  # who waits for the next step gives up no token
        return {sequences[at]: token for at, token in tokens.items()}

    def rows_of(self, draw: Sequence[int]) -> int:
        """Returns the number of rows of a private sequence, with the public one."""
        return 1 + (max(1, len(self.drawn(draw))) if self._padding is None else self._padding)

    def drawn(self, draw: Sequence[int]) -> list[int]:
        """Returns the models of a draw that are in this group, in the order of their rows."""
        return [model for model in draw if model in self.models]

    def _padded(self, draws: Sequence[Sequence[int]]) -> NDArray[np.int16]:
        """Returns the group's models in each draw, padded to a constant number; without one, to the largest."""
        own = [self.drawn(draw) for draw in draws]
        width = max(map(len, own), default=0) if self._padding is None else self._padding
        rows = [models + [NOBODY] * (width - len(models)) for models in own]
        return np.array(rows, dtype=np.int16).reshape(len(rows), width)


def computed(groups: Sequence[Group], step: Step) -> int:
    """Returns the number of rows that the shards compute for a step, padding included."""
    public_alone = len(step.sequences) - step.private
    return public_alone + sum(group.rows_of(draw) for group in groups for draw in step.draws)


def in_order(answers: Iterable[tuple[ShardBatch, Iterable[T]]]) -> list[T]:
    """Returns the values of batches in the order of the whole step.

    Args:
        answers: with each batch one value for each of its sequences, or for each private one: they come first.
    """
    placed = {place: value for batch, values in answers for place, value in zip(batch.places, values, strict=False)}
    return [placed[place] for place in sorted(placed)]


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns what all calls return. If one fails, the others end: later they would tell shards of a step that failed.

    Raises: the first error.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
