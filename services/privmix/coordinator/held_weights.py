"""Computes a step of an additive protocol: a shard of the first group holds the weights, and makes tokens of points.

The shards of the first group send p0 to those of the others, and these send back what their parts add. What reaches the
coordinator has the same size whatever is drawn: a total, and charges, for each sequence.

Tokens continue the contexts of the shards at once, so that the next step may begin before they are known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from ray.actor import ActorHandle

from privmix.coordinator.group import Group, ShardBatch, asking, computed, divided, in_order, together
from privmix.coordinator.recovery import is_temporary
from privmix.coordinator.step import Costs, PartlySampled, Step, StepResult
from privmix.foundation.errors import CoordinatorUnavailable
from privmix.privacy.sampling.categorical import draw
from privmix.shards.reducer import NO_POINT
from privmix.shards.shard import AbsentPeersError


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """Holds a batch whose weights one copy of the first group holds.

    Attributes:
        copy: which one.
        totals: int64 [requests], the sum of each request's weights. A point below it (`categorical.draw`) is a token.
        charges: int64 [S, parts], of the private requests; None without accounts.
    """

    batch: ShardBatch
    copy: int
    totals: NDArray[np.int64]
    charges: NDArray[np.int64] | None


@dataclass(frozen=True)
class HeldWeights(StepResult):
    """Samples beside the rows.

    Attributes:
        timeout_s: how long the shards may take to sample.
    """

    groups: Sequence[Group]
    held: Sequence[HeldBatch]
    timeout_s: float

    async def mix(self) -> Costs:
        """Returns the costs. The shards have mixed already, because an additive protocol draws no noise."""
        charges = [(each.batch, each.charges.tolist()) for each in self.held if each.charges is not None]
        return Costs(charges=list(map(tuple, in_order(charges))))

    def sample(self, paid: Collection[int], free: Collection[int]) -> Awaitable[dict[int, int]]:
        """Draws a point for each of these tokens at once: it makes the token, whether the shards answer or not.

        Raises:
            PartlySampled: a copy did not answer; the tokens of the others are known.
            ValueError: a private sequence is among the free ones, or another among the paid ones. Raised at once.
        """
        private = self.step.private
        if not all(at < private for at in paid) or any(at < private for at in free):
            raise ValueError("paid must name private sequences, and free must name public ones")
        places = sorted({*paid, *free})
        totals = in_order((each.batch, each.totals.tolist()) for each in self.held)
        points = dict(zip(places, draw(totals[at] for at in places), strict=True))
        picking = asyncio.ensure_future(
            self._tokens(points, [asyncio.create_task(self._pick(each, points)) for each in self.held])
        )
        self.groups[0].picking = self.step.sequences, picking
        return picking

    async def _tokens(self, points: Mapping[int, int], picking: Sequence[asyncio.Task[list[int]]]) -> dict[int, int]:
        picked = await asyncio.gather(*picking, return_exceptions=True)
        tokens: dict[int, int] = {}
        errors: list[BaseException] = []
        for held, answer in zip(self.held, picked, strict=True):
            if isinstance(answer, BaseException):
                errors.append(answer)
            else:
                tokens |= zip(held.batch.places, answer, strict=True)
        sampled = {at: tokens[at] for at in points if at in tokens}
        if errors:
            # An error that is not temporary ends sequences, even if other copies have answered.
            raise next((error for error in errors if not is_temporary(error)), PartlySampled(errors[0], sampled))
        return sampled

    async def _pick(self, held: HeldBatch, points: Mapping[int, int]) -> list[int]:
        """Returns the tokens of a batch's sequences. Those without a point have no meaning.

        They are paid for, and the copy holds them: to give it up early would lose them all.
        """
        named = list(zip(held.batch.places, held.batch.step.sequences, strict=True))
        own = np.array([points.get(at, NO_POINT) for at, _ in named], dtype=np.int64)
        names = tuple(name if at in points else None for at, name in named)
        copies = self.groups[0].copies

        def pick(shard: ActorHandle) -> Awaitable[NDArray[np.int64]]:
            copies.told(held.copy).note_picked(names)
            tokens: Awaitable[NDArray[np.int64]] = shard.pick.remote(held.batch.key, own, names)
            return tokens

        async with asking(self.timeout_s):
            picked: NDArray[np.int64] = await copies.same(held.copy, pick)
        tokens: list[int] = picked.tolist()
        return tokens


async def weigh(groups: Sequence[Group], timeout_s: float, step: Step) -> HeldWeights:
    """Lets the shards compute the sampling weights of every sequence, and those of the first group hold them."""
    held = await together(_weigh(groups, timeout_s, batch) for batch in divided(groups, step))
    arrays = [array for each in held for array in (each.totals, each.charges) if array is not None]
    return HeldWeights(
        step,
        computed(groups, step),
        sum(array.nbytes for array in arrays),
        groups,
        held,
        timeout_s,
    )


async def _weigh(groups: Sequence[Group], timeout_s: float, batch: ShardBatch) -> HeldBatch:
    """Computes the weights of a batch. The groups after the first read private sequences alone."""
    first, *others = groups
    key = batch.key
    tell = partial(first.asked, key, batch.step)
    if not others or not batch.step.private:
        copy, answer = await first.copies.first(batch.orders[0], "weigh", tell)
        return HeldBatch(batch, copy, *answer)
    private = batch.step.of(range(batch.step.private))

    async def keep(group: Group, order: Sequence[int]) -> tuple[int, None]:
        picked = await first.picked(private)
        return await group.copies.first(order, "keep", partial(group.asked, key, private, picked=picked))

    (copy, own), *keeping = await together(
        [first.copies.first(batch.orders[0], "begin", tell), *map(keep, others, batch.orders[1:])]
    )
    holders = [(group.copies, holder) for group, (holder, _) in zip(others, keeping, strict=True)]
    peers = [await copies.actor(holder) for copies, holder in holders]
    patience_s = first.copies.patience_s or timeout_s  # all groups have as many copies
    try:
        totals, charges = await first.copies.same(copy, lambda shard: shard.add.remote(key, peers, patience_s))
    except AbsentPeersError as error:
        for place in error.reasons:
            copies, holder = holders[place]
            copies.avoid(holder)
        absent = ", ".join(f"{1 + place} ({reason})" for place, reason in error.reasons.items())
        raise CoordinatorUnavailable(f"there is no partial of groups {absent}") from None
    return HeldBatch(batch, copy, totals, _of_all_parts(groups, [own, *charges]))


def _of_all_parts(groups: Sequence[Group], charges: Sequence[NDArray[np.int64] | None]) -> NDArray[np.int64] | None:
    """Returns what each token charges to each part, from what it charges to each group's parts in ascending order."""
    given = [own for own in charges if own is not None]
    if not given:
        return None
    joined = np.zeros((len(given[0]), sum(len(group.models) for group in groups)), dtype=np.int64)
    for group, own in zip(groups, given, strict=True):
        joined[:, sorted(group.models)] = own
    return joined
