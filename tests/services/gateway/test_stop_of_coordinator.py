"""Claim: a stop ends answers with its reason, refuses new ones and forgets no charge. `test_stopping.py` hears it."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from privmix.coordinator.coordinator import Coordinator
from privmix.coordinator.messages import Delta, Generation
from privmix.foundation.errors import CoordinatorStopping
from privmix.gateway.errors import from_coordinator
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.training import public_model
from tests.support.offline import WORLDS, offline


def test_a_stop_ends_an_answer_and_refuses_the_next_one(tmp_path: Path) -> None:
    async def run() -> None:
        place = tmp_path / "ledger.db"
        coordinator, samples, ledger = offline(Coordinator, *WORLDS["pmixed"], place, public_model.resolve())
        generation = Generation("endless", (504, 253), SamplingOptions(), 400, ignore_eos=True)

        await coordinator.submit("channel", [generation])
        deltas: list[Delta] = []
        async with aclosing(coordinator.events("channel")) as batches:  # type: ignore[type-var]
            async for batch in batches:
                deltas += batch
                if deltas[-1].finish_reason is not None:
                    break
                if len(deltas) >= 3:
                    await coordinator.close()
        assert deltas[-1].finish_reason == "cancelled"
        assert sum(ledger.balance().charged.values()) >= samples.tokens >= sum(delta.tokens for delta in deltas) > 0
        with pytest.raises(CoordinatorStopping) as refusal:
            await coordinator.submit("channel", [generation])
        assert from_coordinator(refusal.value).code == "service_stopping"

    asyncio.run(run())
