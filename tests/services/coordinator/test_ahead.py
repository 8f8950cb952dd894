"""Claim: a step that begins before the tokens before it are known costs nothing where they end their sequence."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.coordinator import coordinator as coordinating
from privmix.coordinator.coordinator import Coordinator
from privmix.coordinator.messages import Delta, Generation
from privmix.coordinator.step import Step, StepResult
from privmix.foundation.errors import CoordinatorUnavailable
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocol import Protocol
from privmix.training import public_model
from tests.support.offline import GRAMMAR, WORLDS, Samples, offline

ADDITIVE = pytest.mark.parametrize(("protocol", "terms"), [WORLDS["pmixed"], WORLDS["individual"]])
X = 104
ONLY_X = SamplingOptions(legal=bytes(X // 8) + bytes([1 << X % 8]))


class World:
    """Runs a coordinator, and records its steps and what its answers get."""

    def __init__(self, folder: Path, protocol: Protocol, terms: PrivacyBudget) -> None:
        made = offline(Coordinator, protocol, terms, folder / "ledger.db", public_model.resolve())
        self.coordinator: Coordinator = made[0]
        self.samples: Samples = made[1]
        self.ledger: Ledger = made[2]
        self.steps: list[Step] = []
        self.unknown: list[int] = []  # how many tokens of the contexts of each step are not known when it begins
        self.deltas: list[Delta] = []
        self.before: Callable[[Step], Awaitable[None]] | None = None
        self._answers: Any = self.coordinator._ensemble.ask
        self.coordinator._ensemble.ask = self._ask  # type: ignore[method-assign]

    async def _ask(self, step: Step) -> StepResult:
        self.steps.append(step)
        self.unknown.append(sum(step.lengths) - sum(map(len, step.contexts)))
        if self.before is not None:
            await self.before(step)
        result: StepResult = await self._answers(step)
        return result

    async def answered(self, *asked: Generation) -> dict[str, str]:
        """Returns why each generation ended. What is sampled, what the ledger charges and what keys pay is the same."""
        reading = asyncio.create_task(self._read())
        await self.coordinator.submit("channel", asked)
        while await self.coordinator.load() or not self.coordinator._stepping.done():  # type: ignore[union-attr]
            await asyncio.sleep(0)
        await self.coordinator.close()
        await asyncio.sleep(0)
        reading.cancel()
        balance = self.ledger.balance()
        assert self.samples.tokens == sum(balance.charged.values()) == sum(delta.charged for delta in self.deltas)
        assert not any(self.samples.charges) or balance.accounts.charged == self.samples.charges
        return {delta.id: delta.finish_reason for delta in self.deltas if delta.finish_reason is not None}

    async def _read(self) -> None:
        async for batch in self.coordinator.events("channel"):
            self.deltas += batch


def generation(id_: str, tokens: int, **fields: Any) -> Generation:
    return Generation(id_, (504, 253), ONLY_X, tokens, ignore_eos=True, **fields)


@ADDITIVE
def test_a_sequence_that_a_stop_string_ends_gets_no_point_for_its_next_row(
    protocol: Protocol, terms: PrivacyBudget, tmp_path: Path
) -> None:
    async def run() -> None:
        world = World(tmp_path, protocol, terms)
        ends = await world.answered(generation("stops", 9, stop=("xx",)), generation("goes on", 5))
        assert ends == {"stops": "stop", "goes on": "length"}
        assert [step.lengths for step in world.steps] == [(2, 2), (3, 3), (4, 4), (5,), (6,)]
        assert world.unknown == [0, 2, 2, 1, 1], "steps begin before the tokens are known"
        assert world.samples.tokens == 2 + 5

    asyncio.run(run())


@ADDITIVE
def test_a_step_begun_ahead_that_fails_is_repeated_with_its_draws(
    protocol: Protocol, terms: PrivacyBudget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard has died after it picked the tokens before, and may know others than are known here."""
    monkeypatch.setattr(coordinating, "REPEAT_S", 0.0)

    drawn = count()
    monkeypatch.setattr(type(protocol), "draw", lambda _: (next(drawn),))

    async def run() -> None:
        world, forgotten = World(tmp_path, protocol, terms), list[int]()
        world.coordinator._ensemble.forget = lambda: forgotten.append(len(world.steps))  # type: ignore[method-assign]

        async def fail(step: Step) -> None:
            if len(world.steps) == 3:
                raise CoordinatorUnavailable("a shard is away")

        world.before = fail
        await world.answered(generation("a", 4), generation("b", 4))
        failed, repeated = world.steps[2:4]
        assert (failed.draws, failed.lengths) == (repeated.draws, repeated.lengths)
        assert (world.unknown[2:4], forgotten) == ([2, 0], [3])
        assert world.samples.tokens == next(drawn) == 2 * 4, "a repeated step draws nothing"

    asyncio.run(run())


def test_who_comes_is_in_the_next_step_and_a_shard_map_waits_for_one(tmp_path: Path) -> None:
    async def run() -> None:
        world, updating = World(tmp_path, *WORLDS["pmixed"]), list[asyncio.Task[int]]()

        async def come(step: Step) -> None:
            if len(world.steps) == 3:
                await world.coordinator.submit("channel", [generation("b", 2)])
            if len(world.steps) == 6:
                shard_map = replace(world.coordinator._shard_map, version=2)
                updating.append(asyncio.create_task(world.coordinator.update_shards(shard_map)))
            assert len(world.steps) < 7 or updating[0].result() == 2

        world.before = come
        await world.answered(generation("a", 20))
        assert (world.steps[3].sequences, world.steps[3].lengths) == (("a", "b"), (5, 2))
        assert world.unknown[5:8] == [1, 0, 1]

    asyncio.run(run())


@pytest.mark.parametrize("then", ["refuse", "public"])
def test_a_budget_that_runs_out_ahead_loses_no_token(then: Any, tmp_path: Path) -> None:
    """Nobody holds budget while he waits for a lease, or two coordinators would wait for each other's."""

    async def run() -> None:
        protocol, terms = WORLDS["pmixed"]
        world, held = World(tmp_path, protocol, terms.model_copy(update={"epsilon": 8.0})), list[int]()
        world.coordinator._settings = replace(world.coordinator._settings, when_exhausted=then)
        budget = world.coordinator._budget
        take = budget._take

        async def taken(event: Any, count: int, *rest: Any) -> Any:
            if budget.available < count:
                held.append(sum(lease.reserved for lease in budget._leases))
            return await take(event, count, *rest)

        budget._take, budget._size = taken, 1  # type: ignore[method-assign, assignment]
        ends = await world.answered(*[generation(f"{at}", 20) for at in range(3)])
        assert set(ends.values()) == {"privacy_budget" if then == "refuse" else "length"}
        assert not sum(delta.lost for delta in world.deltas)
        assert world.samples.tokens == 19, "all that the budget has"
        assert held and not any(held)

    asyncio.run(run())


@pytest.mark.parametrize("grammar", [None, GRAMMAR])
def test_a_channel_that_loses_its_reader_pays_for_nothing_more(grammar: str | None, tmp_path: Path) -> None:
    """Also where Ray cancels the reader's call twice, and where an answer is submitted during or after that."""

    async def run() -> None:
        world = World(tmp_path, *WORLDS["pmixed"])
        reading = asyncio.create_task(world._read())
        await asyncio.sleep(0)
        compiling, begun = asyncio.Event(), world.coordinator._compiler.begun

        async def late(*asked: Any) -> Any:
            await compiling.wait()
            return await begun(*asked)

        world.coordinator._compiler.begun = late  # type: ignore[assignment, method-assign]
        submitting = asyncio.create_task(world.coordinator.submit("channel", [generation("a", 99, grammar=grammar)]))
        async with world.coordinator._paying:
            for _ in range(2):
                await asyncio.sleep(0)
                reading.cancel()
            await asyncio.wait([reading])
        compiling.set()
        (refused,) = await asyncio.gather(submitting, return_exceptions=True)
        assert isinstance(refused, CoordinatorUnavailable) == (grammar is not None)
        with pytest.raises(CoordinatorUnavailable):
            await world.coordinator.submit("channel", [generation("b", 99)])
        assert not await world.coordinator.load() and not world.coordinator._queues
        await world.coordinator.close()
        assert world.samples.tokens == sum(world.ledger.balance().charged.values()) <= 1

    asyncio.run(run())
