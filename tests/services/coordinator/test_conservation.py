"""Claim: whatever fails and whichever clients leave, the ledger and keys pay for all tokens that are sampled."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from privmix.coordinator import coordinator as coordinating
from privmix.coordinator.coordinator import Coordinator
from privmix.coordinator.messages import Delta, Generation
from privmix.coordinator.step import PartlySampled
from privmix.foundation.errors import CoordinatorUnavailable
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.training import public_model
from tests.support.offline import GRAMMAR, WORLDS, HeldHere, offline

Call = Callable[..., Awaitable[Any]]

SEQUENCES, TOKENS = 3, 4
PICKED = HeldHere.picked


Picked = Callable[[HeldHere, dict[int, int]], Awaitable[dict[int, int]]]


@dataclass
class Faults:
    """Makes calls fail now and then, and names those that happened."""

    chance: random.Random
    errors: tuple[Exception, ...] = (CoordinatorUnavailable("a shard is away"), RuntimeError("out of memory"))
    struck: list[str] = field(default_factory=list)

    def strike(self, name: str, probability: float) -> None:
        if self.chance.random() < probability:
            self.struck.append(name)
            raise self.chance.choice(self.errors)

    def in_calls(self, name: str, work: Call, before: float, after: float) -> Call:
        """Returns a coroutine function that fails with these probabilities, before its work or after it."""

        async def called(*arguments: Any) -> Any:
            self.strike(f"{name}, before", before)
            result = await work(*arguments)
            self.strike(f"{name}, after", after)
            return result

        return called

    def in_part(self, picked: Picked, probability: float) -> Picked:
        """Returns a sampling of which some shards do not name their tokens now and then."""

        async def partly(result: HeldHere, drawn: dict[int, int]) -> dict[int, int]:
            tokens = await picked(result, drawn)
            try:
                self.strike("part of a pick", probability)
            except CoordinatorUnavailable as error:
                raise PartlySampled(error, {at: token for at, token in tokens.items() if at % 2}) from None
            return tokens

        return partly


async def run_schedule(
    kind: str, ledger: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[int, ...]]:
    """Runs answers during faults; returns by place what was sampled and paid: tokens, and then the accounts' grains."""
    coordinator, samples, budget = offline(Coordinator, *WORLDS[kind], ledger, public_model.resolve())
    deltas: list[Delta] = []

    async def read() -> None:
        async for batch in coordinator.events("channel"):
            deltas.extend(batch)

    reading = asyncio.create_task(read())
    generations = [
        Generation(f"{at}", (504, 253 + at), SamplingOptions(), TOKENS, grammar=GRAMMAR if at == 1 else None)
        for at in range(SEQUENCES)
    ]
    await coordinator.submit("channel", generations)
    leasing = coordinator._budget._budget.lease
    shards: Any = coordinator._ensemble
    # Its points are drawn at once, so only its answer may be lost.
    monkeypatch.setattr(HeldHere, "picked", faults.in_calls("pick", faults.in_part(PICKED, 0.2), 0.0, 0.2))
    for owner, name, before, after in (
        (shards, "ask", 0.1, 0.1),
        (shards.arithmetic, "mix", 0.1, 0.1),
        (shards.arithmetic, "sample", 0.0, 0.2),
        (coordinator, "_positions", 0.1, 0.1),
        (leasing, "remote", 0.2, 0.2),
    ):
        setattr(owner, name, faults.in_calls(name, getattr(owner, name), before, after))
    while await coordinator.load():
        await asyncio.sleep(0)
        if faults.chance.random() < 0.02:
            faults.struck.append("a client leaves")
            await coordinator.cancel([faults.chance.choice(generations).id])
    while coordinator._stepping is not None and not coordinator._stepping.done():
        await asyncio.sleep(0)
    await coordinator.close()
    await asyncio.sleep(0)  # the last deltas are read
    reading.cancel()
    balance = budget.balance()
    return {
        "sampled": (samples.tokens, *samples.charges),
        "ledger": (sum(balance.charged.values()), *balance.accounts.charged),
        "keys": (sum(delta.charged for delta in deltas), *samples.charges),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORLDS)
def test_what_is_sampled_is_paid_for_in_every_schedule_of_faults(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinating, "REPEAT_S", 0.0)
    struck: set[str] = set()
    for seed in range(12):
        faults = Faults(random.Random(seed))
        paid = asyncio.run(run_schedule(kind, tmp_path / f"{seed}.db", faults, monkeypatch))
        assert paid["sampled"] == paid["ledger"] == paid["keys"], f"seed {seed}: {faults.struck}"
        struck |= set(faults.struck)
    own = {"sample, after", "mix, before"} if kind == "raw rows" else {"pick, after"}
    assert {*own, "_positions, after", "remote, before", "remote, after", "a client leaves"} <= struck
