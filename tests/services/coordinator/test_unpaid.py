"""Claim: every token that is sampled is paid for, wherever its client leaves, and the attack finds one that is not."""

import asyncio
from collections.abc import Sequence

import pytest

from privmix.budget.client import Reservation
from privmix.coordinator.coordinator import Coordinator
from privmix.coordinator.sequence import LiveSequence
from privmix.coordinator.step import StepResult
from tests.support.unpaid import unpaid

pytestmark = pytest.mark.slow


class PaysAfterwards(Coordinator):
    """Samples first, and charges what its clients stay for."""

    async def _draw(self, batch: Sequence[LiveSequence], result: StepResult, reserved: Reservation) -> dict[int, int]:
        private = batch[: result.step.private]
        costs = await result.mix()
        tokens = await result.sample(range(len(private)), ())
        await asyncio.sleep(0)
        await self._charge(costs, [at for at, live in enumerate(private) if live.id in self._live], reserved)
        for live in private:
            live.charge()
        return tokens


class SparesKeys(Coordinator):
    """Charges the ledger alone for tokens that do not reach their client."""

    async def _draw(self, batch: Sequence[LiveSequence], result: StepResult, reserved: Reservation) -> dict[int, int]:
        tokens = await super()._draw(batch, result, reserved)
        for live in batch[: result.step.private]:
            live.charge(-1)
        return tokens


def test_a_client_pays_for_every_sample_wherever_it_leaves() -> None:
    assert unpaid() == ()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (PaysAfterwards, "1 tokens are sampled and 0 charged"),
        (SparesKeys, "1 tokens are sampled and the key pays for 0"),
    ],
)
def test_a_sample_that_nobody_pays_for_is_found(fault: type[Coordinator], told: str) -> None:
    """A client that disconnected while a sampled token was held back learnt it for nothing."""
    found = unpaid(fault)
    assert any(told in sentence for sentence in found)
