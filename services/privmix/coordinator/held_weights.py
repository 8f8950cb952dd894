"""Computes a step of the only group: its shards hold the sampling weights, and make tokens of points below the totals.

What leaves a shard has the same size whatever is drawn: a total, and charges, for each sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privmix.coordinator.group import Group, ShardBatch, asking, in_order
from privmix.coordinator.recovery import is_temporary
from privmix.coordinator.step import Costs, PartlySampled, Step, StepResult
from privmix.privacy.sampling.categorical import draw
from privmix.shards.reducer import NO_POINT, Weighed


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """Holds a batch whose weights one copy holds, and what that copy returned."""

    batch: ShardBatch
    copy: int
    weighed: Weighed


@dataclass(frozen=True)
class HeldWeights(StepResult):
    """Samples beside the rows.

    Attributes:
        totals: the sum of the weights of each sequence. A point below it (`categorical.draw`) is a token.
        timeout_s: how long the shards may take to sample.
    """

    group: Group
    held: Sequence[HeldBatch]
    totals: Sequence[int]
    timeout_s: float

    async def mix(self) -> Costs:
        """Returns the costs. The shards have mixed already, because an additive protocol draws no noise."""
        charges = [
            (each.batch, each.weighed.charges.tolist()) for each in self.held if each.weighed.charges is not None
        ]
        return Costs(charges=list(map(tuple, in_order(charges))))

    async def sample(self, paid: Collection[int], free: Collection[int]) -> dict[int, int]:
        """Draws a point for each of these tokens at once: it makes the token, whether the shards answer or not.

        Raises:
            PartlySampled: a copy did not answer; the tokens of the others are known.
            ValueError: a private sequence is among the free ones, or another among the paid ones.
        """
        private = self.step.private
        if not all(at < private for at in paid) or any(at < private for at in free):
            raise ValueError("paid must name private sequences, and free must name public ones")
        places = sorted({*paid, *free})
        points = dict(zip(places, draw(self.totals[at] for at in places), strict=True))
        picked = await asyncio.gather(*(self._pick(each, points) for each in self.held), return_exceptions=True)
        tokens: dict[int, int] = {}
        errors: list[BaseException] = []
        for held, answer in zip(self.held, picked, strict=True):
            if isinstance(answer, BaseException):
                errors.append(answer)
            else:
                tokens |= zip(held.batch.places, answer, strict=True)
        sampled = {at: tokens[at] for at in places if at in tokens}
        if errors:
            # An error that is not temporary ends sequences, even if other copies have answered.
            raise next((error for error in errors if not is_temporary(error)), PartlySampled(errors[0], sampled))
        return sampled

    async def _pick(self, held: HeldBatch, points: Mapping[int, int]) -> list[int]:
        """Returns the tokens of a batch's sequences. Those without a point have no meaning.

        They are paid for, and the copy holds them: to give it up early would lose them all.
        """
        own = np.array([points.get(place, NO_POINT) for place in held.batch.places], dtype=np.int64)
        async with asking(self.timeout_s):
            picked: NDArray[np.int64] = await self.group.copies.same(
                held.copy, lambda shard: shard.pick.remote(held.batch.key, own), patient=True
            )
        tokens: list[int] = picked.tolist()
        return tokens


async def weigh(group: Group, timeout_s: float, step: Step) -> HeldWeights:
    """Lets the shards of the only group compute the sampling weights of every sequence, and hold them."""
    held = await asyncio.gather(*(_weigh(group, batch) for batch in group.batches(step)))
    return HeldWeights(
        step,
        sum(each.batch.computed for each in held),
        sum(each.weighed.nbytes for each in held),
        group,
        held,
        in_order((each.batch, each.weighed.totals.tolist()) for each in held),
        timeout_s,
    )


async def _weigh(group: Group, batch: ShardBatch) -> HeldBatch:
    reduction = group.reduction(batch.step)
    copy, weighed = await group.copies.first(
        batch.order, lambda shard: shard.weigh.remote(batch.key, batch.requests, reduction, batch.coming)
    )
    return HeldBatch(batch, copy, weighed)
