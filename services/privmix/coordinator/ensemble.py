"""Queries the ensemble: what the shards of all part groups compute for a step becomes one result.

A step has a constant shape. For each private sequence every shard computes one public row and a fixed number of part
rows: the most that the protocol can draw from its group. `ZERO` fills the rows that the draw does not use. Thus the
number, the size and the order of the engines' operations do not depend on the draw, and every shard reads every token.

Which of two ways a result is made follows from the protocol. With an additive one (`Protocol.additive`) the shards
reduce their rows and hold the sampling weights (`held_weights`), and what leaves them has a constant shape, too. With
others the rows that are used leave the shards (`raw_rows`).

A mechanism reproduced as published may draw the number of parts (`Protocol.rows` is None). An observer of its timing
can learn that number, and its distribution over the shards.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from ray.actor import ActorHandle

from privmix.coordinator import held_weights, raw_rows
from privmix.coordinator.arithmetic import Arithmetic
from privmix.coordinator.copies import ShardCopies
from privmix.coordinator.group import Group, asking
from privmix.coordinator.step import Step, StepResult
from privmix.fleet.shard_map import ShardMap
from privmix.foundation.errors import CoordinatorUnavailable
from privmix.shards.shard import ShardStatus


class ShardedEnsemble:
    """Asks all part groups in parallel.

    Args:
        actor: returns the living shard with a name, or raises ValueError.
        arithmetic: mixes what the shards do not mix themselves.
        timeout_s: the timeout of a step.
        patience_s: how long a copy of a shard may take before the next copy is called too.
    """

    def __init__(
        self,
        shard_map: ShardMap,
        actor: Callable[[str], ActorHandle],
        arithmetic: Arithmetic,
        timeout_s: float,
        patience_s: float,
    ) -> None:
        protocol = shard_map.protocol
        # Rows pass through Ray's object store. A line encrypts nothing.
        lines = protocol.additive and not _ray_encrypts()
        self._groups = [
            Group(group, protocol, ShardCopies(group.shards, actor, patience_s, lines=lines))
            for group in shard_map.groups
        ]
        self._arithmetic = None if protocol.additive else arithmetic
        self._timeout_s = timeout_s
        self._ask: Callable[[Step], Awaitable[StepResult]]
        if protocol.additive:
            self._ask = partial(held_weights.weigh, self._groups, timeout_s)
        else:
            self._ask = partial(raw_rows.collect, self._groups, protocol, arithmetic)

    @property
    def rows_of_a_sequence(self) -> int:
        """The maximum number of rows that the groups compute for a token of one sequence."""
        return sum(group.rows for group in self._groups)

    def prepare(self) -> None:
        """Prepares the arithmetic, unless the shards mix. It takes seconds."""
        if self._arithmetic is not None:
            self._arithmetic.prepare()

    async def ask(self, step: Step) -> StepResult:
        """Returns what the shards compute for a step.

        Raises:
            CoordinatorUnavailable: a group failed or did not answer in time. The step fails as a whole, because leaving
                a drawn model out would be another mechanism.
            ValueError: an engine refuses the sequences.
        """
        async with asking(self._timeout_s):
            return await self._ask(step)

    def drop_caches(self, sequences: Sequence[str]) -> None:
        """Drops the caches of sequences that have ended."""
        for group in self._groups:
            group.copies.drop_caches(sequences)

    def forget(self) -> None:
        """Assumes that no shard knows anything: one may know a token that is lost here."""
        for group in self._groups:
            group.copies.forget()

    def close(self) -> None:
        """Ends the connections to the shards."""
        for group in self._groups:
            group.copies.close()

    async def status(self) -> list[list[ShardStatus | CoordinatorUnavailable]]:
        """Returns, for each group, the status of each copy or the error that explains its absence."""
        return await asyncio.gather(*(group.copies.status() for group in self._groups))


def _ray_encrypts() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")  # as Ray reads it
