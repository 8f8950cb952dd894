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

import numpy as np
import torch

from privmix.budget.accounts import Grains
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.coordinator.arithmetic import Arithmetic
from privmix.coordinator.coordinator import Coordinator, CoordinatorSettings
from privmix.coordinator.draws import Draws
from privmix.coordinator.pending_release import PendingRelease
from privmix.coordinator.raw_rows import RawRows
from privmix.coordinator.step import Costs, Step, StepResult
from privmix.coordinator.text import Detokenizer
from privmix.fleet.shard_map import PartGroup, ShardMap
from privmix.privacy.events import from_json
from privmix.privacy.mollifiers.shaping import shape_public
from privmix.privacy.protocol import PartRows, Protocol
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.privacy.protocols.pmixed import PMixed
from privmix.structure import grammar

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


@dataclass
class Samples:
    """Counts the tokens that are sampled from a protocol, and what they should charge to each part's account."""

    tokens: int = 0
    charges: Grains = ()

    def add(self, costs: Costs, paid: Collection[int]) -> None:
        """Counts the tokens of these places of a step."""
        self.tokens += len(paid)
        for own in [costs.charges[at] for at in paid] if costs.charges else ():
            self.charges = tuple(map(sum, zip(self.charges or (0,) * len(own), own, strict=True)))


class CountedArithmetic(Arithmetic):
    """Counts the tokens of raw rows that are sampled from a protocol."""

    def __init__(self, samples: Samples) -> None:
        super().__init__(1, "cpu")
        self._pool = Inline(1)
        self._samples = samples

    async def sample(
        self, pending: Sequence[PendingRelease], paid: Collection[int], free: Collection[int]
    ) -> dict[int, int]:
        self._samples.add(Costs(), paid)
        return await super().sample(pending, paid, free)


@dataclass(frozen=True)
class HeldHere(StepResult):
    """Stands for weights that shards hold. It samples when it is called, and answers a turn later."""

    weights: PendingRelease
    costs: Costs
    samples: Samples

    async def mix(self) -> Costs:
        return self.costs

    def sample(self, paid: Collection[int], free: Collection[int]) -> Awaitable[dict[int, int]]:
        self.samples.add(self.costs, paid)
        return self.picked(self.weights.sample(paid, free))

    async def picked(self, tokens: dict[int, int]) -> dict[int, int]:
        await asyncio.sleep(0)
        return tokens


class SameRows:
    """Stands for the shards of a protocol whose parts all have the same row."""

    def __init__(self, protocol: Protocol, vocabulary: int, samples: Samples) -> None:
        self.rows_of_a_sequence = 1 + protocol.parts
        self.arithmetic = CountedArithmetic(samples)
        self._protocol = protocol
        self._ratios = 1.0 + 3.0 * (torch.arange(vocabulary) % FAVOURED == 0).float()
        self._samples = samples
        self._asked: tuple[str, ...] = ()

    async def ask(self, step: Step) -> StepResult:
        self._asked = step.sequences
        await asyncio.sleep(0)
        self._asked = ()
        size = len(step.sequences) * self.rows_of_a_sequence, 0
        if not self._protocol.additive:
            public, row = np.zeros(len(self._ratios), np.float32), self._ratios.log().numpy()
            drawn = [row for draw in step.draws for _ in draw]
            return RawRows(step, *size, self.arithmetic, self._protocol, [public] * len(step.sequences), drawn)
        p0 = torch.cat([shape_public(torch.zeros(1, len(self._ratios)), [own]) for own in step.options])
        private, parts = p0[: step.private], self._protocol.parts
        ratios = self._ratios.expand(len(private), parts, -1)
        ratios = ratios / (ratios * private[:, None]).sum(-1, keepdim=True) * (private[:, None] > 0)
        flags = torch.zeros(len(private), parts, dtype=torch.bool)
        flags[:, : self._protocol.rows or parts] = True
        granted = None if step.allowances is None else torch.from_numpy(step.allowances)
        partial = self._protocol.partial(PartRows(private, ratios, flags, granted))
        charges = [] if partial.charges is None else list(map(tuple, partial.charges.tolist()))
        weights = PendingRelease(p0, self._protocol.combine(private, partial.sums).weights)
        return HeldHere(step, *size, weights, Costs(charges=charges), self._samples)

    def prepare(self) -> None:
        """Does nothing: the arithmetic runs inline."""

    def close(self) -> None: ...

    def drop_caches(self, sequences: Sequence[str]) -> None:
        assert not set(sequences) & set(self._asked), "else a shard forgets what it is asked to continue"

    def forget(self) -> None:
        """Does nothing: nothing is remembered."""


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
    kind: type[Coordinator], protocol: Protocol, terms: PrivacyBudget, ledger: Path, model: Path
) -> tuple[Coordinator, Samples, Ledger]:
    """Returns a coordinator of this class, what it samples, and its ledger, which is created.

    Call it in the event loop that the coordinator uses, whose default executor becomes an inline one.

    Args:
        kind: `Coordinator`, or a class with a fault.
        model: a model's directory, for its tokenizer.
    """
    budget, samples = LocalBudget(Ledger.create(ledger, terms)), Samples()
    ensemble = SameRows(protocol, Detokenizer.load(model).vocabulary().tokenizer.vocab_size, samples)

    class Offline(kind):  # type: ignore[misc, valid-type]
        def _actor(self, name: str) -> Any:
            if name != self._settings.budget:
                raise ValueError(f"there is no actor {name!r}")
            return budget

        def _use(self, shard_map: ShardMap) -> None:
            self._shard_map, self._protocol, self._ensemble = shard_map, protocol, ensemble
            self._draws = Draws(protocol)

    asyncio.get_running_loop().set_default_executor(Inline(1))
    group = PartGroup(0, {part: f"part-{part}" for part in range(protocol.parts)}, ("shard",))
    coordinator = Offline(CoordinatorSettings(model, "offline", "budget"), ShardMap(1, protocol, (group,)))
    return coordinator, samples, budget.ledger


INDIVIDUAL = IndividualSettings(epsilon=8.0, delta=1e-5, tokens=1024)
TERMS = PrivacyBudget(ensemble="e", epsilon=1e3, delta=1e-5, order=4.0, adjacency="user")
WORLDS: dict[str, tuple[Protocol, PrivacyBudget]] = {
    "raw rows": (PMixed(2, 1.0, mollifier="renyi", order=4, loss=0.1), TERMS),
    "pmixed": (PMixed(2, 1.0, 0.4), TERMS),
    "individual": (INDIVIDUAL.plan(2), PrivacyBudget.of("e", INDIVIDUAL, INDIVIDUAL.plan(2))),
}
"""Protocols of each way to get a token, with what pays for them."""
GRAMMAR = grammar.of_regex("[AB][a-z]{3}[0-9]{3}x")
