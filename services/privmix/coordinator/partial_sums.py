"""Computes a step of several groups: each sends a partial for each private sequence, and the coordinator adds them up.

From each group comes one partial for each private sequence, whatever is drawn. The first group sends p0 with its
partials, in one call. The others keep their rows and reduce them in a second call, with the p0 of the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

import numpy as np

from privmix.coordinator.arithmetic import Arithmetic, LocalResult
from privmix.coordinator.group import Group, ShardBatch, in_order
from privmix.coordinator.pending_release import PendingRelease
from privmix.coordinator.step import Step
from privmix.privacy.protocol import Protocol
from privmix.shards.reducer import Reduced


@dataclass(frozen=True)
class PartialSums(LocalResult):
    """Holds what the shards made of the rows of each sequence. Arrays share memory with Ray's object store.

    Attributes:
        public: p0 of each sequence, float32 [V].
        sums: of each private sequence, one partial [V] of each group (`privmix.privacy.protocol.Partial`).
        charges: of each private sequence, what it charges to each part, int64 [parts]; empty without accounts.
    """

    public: Sequence[np.ndarray]
    sums: Sequence[Sequence[np.ndarray]]
    charges: Sequence[np.ndarray]

    def release(self, chunk: slice, device: str) -> PendingRelease:
        """Adds up the groups' partials of consecutive sequences, and computes the protocol's release from them.

        Raises:
            ValueError: see `Protocol.added`.
        """
        return PendingRelease.combined(self.protocol, self.public[chunk], self.sums[chunk], self.charges[chunk], device)


Reductions = Sequence[tuple[ShardBatch, Reduced]]
"""What a group returned for each batch."""


async def reduce(groups: Sequence[Group], protocol: Protocol, arithmetic: Arithmetic, step: Step) -> PartialSums:
    """Lets the shards of all groups reduce their rows."""
    first, *others = groups
    private = step.of(range(step.private))
    public = asyncio.ensure_future(_reduced(first, step))
    calls = (_reduced_with(group, private, public) for group in others)
    answers: Sequence[Reductions] = await asyncio.gather(public, *calls)
    sums = [in_order((batch, own.sums) for batch, own in answer if own.sums is not None) for answer in answers]
    charges = [in_order((batch, own.charges) for batch, own in answer if own.charges is not None) for answer in answers]
    return PartialSums(
        step,
        sum(batch.computed for answer in answers for batch, _ in answer),
        sum(reduced.nbytes for answer in answers for _, reduced in answer),
        arithmetic,
        protocol,
        _public(answers[0]),
        list(zip(*sums, strict=True)),
        [_of_all_parts(groups, protocol.parts, by_group) for by_group in zip(*charges, strict=True)],
    )


async def _reduced(group: Group, step: Step) -> Reductions:
    """Returns p0 of each sequence, and the partial of each private one."""

    async def reduced(batch: ShardBatch) -> tuple[ShardBatch, Reduced]:
        reduction = group.reduction(batch.step)
        _, answer = await group.copies.first(
            batch.order, lambda shard: shard.reduce.remote(batch.requests, reduction, batch.coming)
        )
        return batch, answer

    return await asyncio.gather(*map(reduced, group.batches(step)))


async def _reduced_with(group: Group, step: Step, public: Awaitable[Reductions]) -> Reductions:
    """Returns the partial of each sequence, with p0 from another group, which computes it at the same time."""

    async def reduced(batch: ShardBatch) -> tuple[ShardBatch, Reduced]:
        copy, _ = await group.copies.first(
            batch.order, lambda shard: shard.keep.remote(batch.key, batch.requests, batch.coming)
        )
        p0 = _public(await public)
        stacked, reduction = np.stack([p0[place] for place in batch.places]), group.reduction(batch.step)
        answer = await group.copies.same(copy, lambda shard: shard.reduce_kept.remote(batch.key, reduction, stacked))
        return batch, answer

    return await asyncio.gather(*map(reduced, group.batches(step)))


def _public(first: Reductions) -> list[np.ndarray]:
    """Returns p0 of each sequence, from the answers of the first group."""
    return in_order((batch, reduced.public) for batch, reduced in first if reduced.public is not None)


def _of_all_parts(groups: Sequence[Group], parts: int, by_group: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the charges of a token to each part, from those of each group's parts in ascending order."""
    charges = np.zeros(parts, dtype=np.int64)
    for group, own in zip(groups, by_group, strict=True):
        charges[sorted(group.models)] = own
    return charges
