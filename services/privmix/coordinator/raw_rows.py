"""Computes a step of a protocol that needs all rows together: those that are used leave the shards, and are mixed here.

These are the drawn rows of each group, and the public rows of the first group. This is the one place where votes,
measured losses and mechanisms reproduced as published become a `StepResult`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain

import numpy as np

from privmix.coordinator.arithmetic import Arithmetic
from privmix.coordinator.group import Group, ShardBatch, computed, divided, in_order, together
from privmix.coordinator.pending_release import PendingRelease
from privmix.coordinator.step import Costs, Step, StepResult
from privmix.privacy.protocol import Protocol


@dataclass(frozen=True)
class RawRows(StepResult):
    """Holds the logits of each sequence. A row is float32 [V] and shares memory with Ray's object store.

    Attributes:
        public: one row for each sequence.
        drawn: one row for each drawn model, grouped by private sequence.
    """

    arithmetic: Arithmetic
    protocol: Protocol
    public: Sequence[np.ndarray]
    drawn: Sequence[np.ndarray]
    _pending: list[PendingRelease] = field(default_factory=list, init=False)

    async def mix(self) -> Costs:
        self._pending.extend(await self.arithmetic.mix(len(self.step.sequences), self.release))
        return Costs([loss for chunk in self._pending for loss in chunk.losses or ()])

    def sample(self, paid: Collection[int], free: Collection[int]) -> Awaitable[dict[int, int]]:
        return self.arithmetic.sample(self._pending, paid, free)

    def release(self, chunk: slice, device: str) -> PendingRelease:
        """Shapes the rows of consecutive sequences and computes the protocol's release for the private ones."""
        own = self.step.of(range(len(self.step.sequences))[chunk])
        firsts = list(accumulate(map(len, self.step.draws), initial=0))
        first, end = (firsts[min(place, self.step.private)] for place in (chunk.start, chunk.stop))
        return PendingRelease.of(self.protocol, own, self.public[chunk], self.drawn[first:end], device)


async def collect(groups: Sequence[Group], protocol: Protocol, arithmetic: Arithmetic, step: Step) -> RawRows:
    """Returns the public row of every sequence and the rows of the models drawn for it, without the padding."""
    batches = divided(groups, step)
    answers = await together(
        together([_rows(group, at, batch) for batch in batches]) for at, group in enumerate(groups)
    )
    rows = [chain.from_iterable(in_order(answer)) for answer in answers]
    of_model = {model: own for group, own in zip(groups, rows, strict=True) for model in group.models}
    public, drawn = list[np.ndarray](), list[np.ndarray]()
    for place in range(len(step.sequences)):
        public.append(next(rows[0]))
        drawn += (next(of_model[model]) for model in (step.draws[place] if place < step.private else ()))
    return RawRows(
        step,
        computed(groups, step),
        sum(row.nbytes for answer in answers for _, sequences in answer for own in sequences for row in own),
        arithmetic,
        protocol,
        public,
        drawn,
    )


async def _rows(group: Group, at: int, batch: ShardBatch) -> tuple[ShardBatch, list[np.ndarray]]:
    """Returns the rows of each sequence that are used, [rows, V]. The groups after the first send no public ones."""
    step = batch.step.of(range(batch.step.private)) if at else batch.step
    if not step.sequences:
        return batch, []
    tell = partial(group.asked, batch.key, step)
    _, answer = await group.copies.first(batch.orders[at], "next_token", tell, public=not at)
    public_alone = len(step.sequences) - step.private
    used = [(not at) + len(group.drawn(draw)) for draw in (*step.draws, *[()] * public_alone)]
    return batch, np.split(answer, np.cumsum(used)[:-1])
