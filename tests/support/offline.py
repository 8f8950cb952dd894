"""Runs the service's coordinator and ledger in this process, without Ray and without models.

The rows are the same for every token, so a step takes milliseconds. Whatever the coordinator gives to a thread runs at
once, so that a run of its event loop is the same each time, turn by turn.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from privmix.budget.accounts import Grains
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.coordinator.arithmetic import Arithmetic
from privmix.coordinator.coordinator import Coordinator, CoordinatorSettings
from privmix.coordinator.draws import DrawQueue
from privmix.coordinator.partial_sums import PartialSums
from privmix.coordinator.pending_release import PendingRelease
from privmix.coordinator.step import Costs, Step, StepResult
from privmix.coordinator.text import Detokenizer
from privmix.fleet.shard_map import PartGroup, ShardMap
from privmix.privacy.events import from_json
from privmix.privacy.mollifiers.shaping import shape_public
from privmix.privacy.protocol import PartRows, Protocol

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
        (chunk,) = pending
        for index, own in enumerate(chunk.charges or ()):
            if index in paid:
                self.charges = tuple(map(sum, zip(self.charges or (0,) * len(own), own, strict=True)))
        return await super().sample(pending, paid, free)


class SameRows:
    """Stands for the shards of an additive protocol whose parts all have the same row, in several groups."""

    def __init__(self, protocol: Protocol, vocabulary: int, arithmetic: CountedArithmetic) -> None:
        self.rows_of_a_sequence = 1 + protocol.parts
        self._protocol = protocol
        self._vocabulary = vocabulary
        self._arithmetic = arithmetic

    async def ask(self, step: Step) -> StepResult:
        await asyncio.sleep(0)
        public = torch.cat([shape_public(torch.zeros(1, self._vocabulary), [own]) for own in step.options])
        p0, parts = public[: step.private], self._protocol.parts
        ratios = 1.0 + 3.0 * (torch.arange(self._vocabulary) % FAVOURED == 0).float().expand(len(p0), parts, -1)
        ratios = ratios / (ratios * p0[:, None]).sum(-1, keepdim=True) * (p0[:, None] > 0)
        drawn = torch.zeros(len(p0), parts, dtype=torch.bool)
        drawn[:, : self._protocol.rows or parts] = True
        granted = None if step.allowances is None else torch.from_numpy(step.allowances)
        partial = self._protocol.partial(PartRows(p0, ratios, drawn, granted))
        return PartialSums(
            step,
            len(step.sequences) * self.rows_of_a_sequence,
            0,
            self._arithmetic,
            self._protocol,
            list(public.numpy()),
            [[row] for row in partial.sums.numpy()],
            [] if partial.charges is None else list(partial.charges.numpy()),
        )

    def prepare(self) -> None:
        """Does nothing: the arithmetic runs inline."""

    def drop_caches(self, sequences: Sequence[str]) -> None:
        """Does nothing: there are no caches."""


@dataclass(frozen=True)
class HeldHere(StepResult):
    """Stands for weights that a shard holds. It samples when it is called, and answers a turn later."""

    weights: StepResult
    costs: Costs

    async def mix(self) -> Costs:
        return self.costs

    async def sample(self, paid: Collection[int], free: Collection[int]) -> dict[int, int]:
        tokens = await self.weights.sample(paid, free)
        await asyncio.sleep(0)
        return tokens


class HeldRows(SameRows):
    """Stands for one shard with all these parts, which holds the weights of a step and makes tokens of points."""

    async def ask(self, step: Step) -> StepResult:
        sums = await super().ask(step)
        return HeldHere(step, sums.computed, 8 * len(step.sequences), sums, await sums.mix())


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
        self.lease = _Method(lambda event, count, lease, parts: ledger.lease(from_json(event), count, lease, parts))
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
    ensemble = (HeldRows if held else SameRows)(protocol, vocabulary, arithmetic)

    class Offline(kind):  # type: ignore[misc, valid-type]
        def _actor(self, name: str) -> Any:
            if name != self._settings.budget:
                raise ValueError(f"there is no actor {name!r}")
            return budget

        def _use(self, shard_map: ShardMap) -> None:
            self._shard_map, self._protocol, self._ensemble = shard_map, protocol, ensemble
            self._draws = DrawQueue(protocol)

    asyncio.get_running_loop().set_default_executor(Inline(1))
    group = PartGroup(0, {part: f"part-{part}" for part in range(protocol.parts)}, ("shard",))
    coordinator = Offline(CoordinatorSettings(model, "offline", "budget"), ShardMap(1, protocol, (group,)))
    return coordinator, arithmetic, budget.ledger
