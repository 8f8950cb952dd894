"""Computes a step of a protocol that needs all rows together: those that are used leave the shards, and are mixed here.

These are the drawn rows of each group, and the public rows of the first group. This is the one place where votes,
measured losses and mechanisms reproduced as published become a `StepResult`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from privmix.coordinator.arithmetic import Arithmetic, LocalResult
from privmix.coordinator.group import Group, ShardBatch, in_order
from privmix.coordinator.pending_release import PendingRelease
from privmix.coordinator.step import Step
from privmix.engine.engine import PUBLIC, ZERO
from privmix.privacy.protocol import Protocol


@dataclass(frozen=True)
class RawRows(LocalResult):
    """Holds the logits of each sequence. A row is float32 [V] and shares memory with Ray's object store.

    Attributes:
        public: one row for each sequence.
        drawn: one row for each drawn model, grouped by private sequence.
    """

    public: Sequence[np.ndarray]
    drawn: Sequence[np.ndarray]

    def release(self, chunk: slice, device: str) -> PendingRelease:
        """Shapes the rows of consecutive sequences and computes the protocol's release for the private ones."""
        own = self.step.of(range(len(self.step.sequences))[chunk])
        firsts = list(accumulate(map(len, self.step.draws), initial=0))
        first, end = (firsts[min(place, self.step.private)] for place in (chunk.start, chunk.stop))
        return PendingRelease.of(self.protocol, own, self.public[chunk], self.drawn[first:end], device)


async def collect(groups: Sequence[Group], protocol: Protocol, arithmetic: Arithmetic, step: Step) -> RawRows:
    """Returns the public row of every sequence and the rows of the models drawn for it, without the padding."""
    private = step.of(range(step.private))
    asked = [(step, frozenset({ZERO})), *[(private, frozenset({ZERO, PUBLIC}))] * (len(groups) - 1)]
    calls = (_rows(group, own, unused) for group, (own, unused) in zip(groups, asked, strict=True))
    answers = await asyncio.gather(*calls)
    rows = [chain.from_iterable(in_order(answer)) for answer in answers]
    of_model = {model: own for group, own in zip(groups, rows, strict=True) for model in group.models}
    public, drawn = list[np.ndarray](), list[np.ndarray]()
    for place in range(len(step.sequences)):
        public.append(next(rows[0]))
        drawn += (next(of_model[model]) for model in (step.draws[place] if place < step.private else ()))
    return RawRows(
        step,
        sum(batch.computed for answer in answers for batch, _ in answer),
        sum(row.nbytes for answer in answers for _, sequences in answer for own in sequences for row in own),
        arithmetic,
        protocol,
        public,
        drawn,
    )


async def _rows(group: Group, step: Step, unused: Collection[str]) -> list[tuple[ShardBatch, list[np.ndarray]]]:
    """Returns the rows of each sequence, [rows, V], without those of some adapters."""

    async def rows(batch: ShardBatch) -> tuple[ShardBatch, list[np.ndarray]]:
        used = [[name not in unused for name in request.adapters] for request in batch.requests]
        returned = np.flatnonzero(np.concatenate(used)).tolist()
        _, answer = await group.copies.first(
            batch.order, lambda shard: shard.next_token.remote(batch.requests, batch.coming, returned)
        )
        return batch, np.split(answer, np.cumsum([sum(own) for own in used])[:-1])

    return await asyncio.gather(*map(rows, group.batches(step)))
