"""Runs the service's coordinator and ledger in this process, without Ray and without models.

The rows are the same for every token, so a step takes milliseconds. Whatever the coordinator gives to a thread runs at
once, so that a run of its event loop is the same each time, turn by turn.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from services.budget.accounts import Grains
from services.budget.ledger import Ledger
from services.budget.privacy_budget import PrivacyBudget
from services.coordinator.arithmetic import Arithmetic
from services.coordinator.coordinator import Coordinator, CoordinatorSettings
from services.coordinator.ensemble import HeldWeights, PartialSums, Query
from services.coordinator.pending_release import PendingRelease
from services.coordinator.text import Detokenizer
from services.fleet.shard_map import PartGroup, ShardMap
from services.privacy.events import from_json
from services.privacy.mollifiers.shaping import SamplingOptions, shape_public
from services.privacy.protocol import PartRows, Protocol

FAVOURED = 5
"""Every part gives tokens of these ids' remainder a greater probability than the public model does."""


class Inline(ThreadPoolExecutor):
    """Runs work at once, in the thread that submits it."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments, **named))
        except Exception as error:
            future.set_exception(error)
        return future


class CountedArithmetic(Arithmetic):
    """Counts the tokens that are sampled from a protocol, and what they should charge to each part's account."""

    def __init__(self) -> None:
        super().__init__(1, "cpu")
        self._pool = Inline(1)
        self.sampled = 0
        self.charges: Grains = ()

    async def sample(
        self, pending: Sequence[PendingRelease], paid: Collection[int], free: Collection[int]
    ) -> dict[int, int]:
        self.sampled += len(paid)
        (share,) = pending
        for index, own in zip(share.private, share.charges or (), strict=False):
            if index in paid:
                self.charges = tuple(map(sum, zip(self.charges or (0,) * len(own), own, strict=True)))
        return await super().sample(pending, paid, free)


class SameRows:
    """Stands for the shards of an additive protocol whose parts all have the same row."""

    samples = False

    def __init__(self, protocol: Protocol, vocabulary: int) -> None:
        self.rows_of_a_query = 1 + protocol.parts
        self._protocol = protocol
        self._vocabulary = vocabulary

    async def reduce(
        self, queries: Sequence[Query], options: Sequence[SamplingOptions], allowances: Sequence[Grains] = ()
    ) -> PartialSums:
        await asyncio.sleep(0)
        public = torch.cat([shape_public(torch.zeros(1, self._vocabulary), [own]) for own in options])
        private = [index for index, query in enumerate(queries) if query.private]
        p0, parts = public[private], self._protocol.parts
        ratios = 1.0 + 3.0 * (torch.arange(self._vocabulary) % FAVOURED == 0).float().expand(len(private), parts, -1)
        ratios = ratios / (ratios * p0[:, None]).sum(-1, keepdim=True) * (p0[:, None] > 0)
        drawn = torch.zeros(len(private), parts, dtype=torch.bool)
        drawn[:, : self._protocol.rows or parts] = True
        granted = torch.tensor(allowances, dtype=torch.int64) if allowances else None
        partial = self._protocol.partial(PartRows(p0, ratios, drawn, granted))
        return PartialSums(
            list(public.numpy()),
            [[row] for row in partial.sums.numpy()],
            [] if partial.charges is None else list(partial.charges.numpy()),
            tuple(query.private for query in queries),
            len(queries) * self.rows_of_a_query,
            0,
        )

    def drop_caches(self, sequences: Sequence[str]) -> None:
        """Does nothing: there are no caches."""


class HeldRows(SameRows):
    """Stands for one shard with all these parts, which holds the weights of a step and makes tokens of points."""

    samples = True

    def __init__(self, protocol: Protocol, vocabulary: int, arithmetic: CountedArithmetic) -> None:
        super().__init__(protocol, vocabulary)
        self._arithmetic = arithmetic

    async def weigh(
        self, queries: Sequence[Query], options: Sequence[SamplingOptions], allowances: Sequence[Grains] = ()
    ) -> HeldWeights:
        partials = await self.reduce(queries, options, allowances)
        self._weights = PendingRelease.combined(self._protocol, partials, "cpu")
        charges, names = self._weights.charges or (), [query.sequence for query in queries]
        return HeldWeights(names, [1] * len(names), charges, partials.private, partials.computed, 8 * len(names), ())

    async def sample(self, held: HeldWeights, paid: Collection[int], free: Collection[int]) -> dict[int, int]:
        """Samples when it is called. The answer comes a turn later."""
        tokens = await self._arithmetic.sample([self._weights], paid, free)
        await asyncio.sleep(0)
        return tokens


class _Method:
    """Calls a function as Ray calls a method of an actor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        async def called() -> Any:
            await asyncio.sleep(0)
            return self._function(*arguments)

        return asyncio.ensure_future(called())


class LocalBudget:
    """Stands for the budget actor, with the ledger in this process."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.lease = _Method(
            lambda event, count, lease, trace, parts: ledger.lease(from_json(event), count, lease, parts)
        )
        self.settle = _Method(ledger.settle)


def offline(
    kind: type[Coordinator], protocol: Protocol, terms: PrivacyBudget, ledger: Path, model: Path, *, held: bool = False
) -> tuple[Coordinator, CountedArithmetic, Ledger]:
    """Returns a coordinator of this class, what it samples with, and its ledger, which is created.

    Call it in the event loop that the coordinator uses, whose default executor becomes an inline one.

    Args:
        kind: `Coordinator`, or a class with a fault.
        model: a model's directory, for its tokenizer.
        held: one shard has all parts and holds the weights of a step. By default their sums reach the coordinator.
    """
    budget, arithmetic = LocalBudget(Ledger.create(ledger, terms)), CountedArithmetic()
    vocabulary = Detokenizer.load(model).vocabulary().tokenizer.vocab_size
    ensemble = HeldRows(protocol, vocabulary, arithmetic) if held else SameRows(protocol, vocabulary)

    class Offline(kind):  # type: ignore[misc, valid-type]
        def _actor(self, name: str) -> Any:
            if name != self._settings.budget:
                raise ValueError(f"there is no actor {name!r}")
            return budget

        def _use(self, shard_map: ShardMap) -> None:
            self._shard_map, self._protocol, self._ensemble = shard_map, shard_map.protocol, ensemble

    asyncio.get_running_loop().set_default_executor(Inline(1))
    group = PartGroup(0, {part: f"part-{part}" for part in range(protocol.parts)}, ("shard",))
    coordinator = Offline(CoordinatorSettings(model, "offline", "budget"), ShardMap(1, protocol, (group,)))
    coordinator._arithmetic = arithmetic
    return coordinator, arithmetic, budget.ledger
