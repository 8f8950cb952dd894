"""Claim: a stop of the service ends open streams with an error event, refuses new requests, and forgets no charge."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from privmix.budget.privacy_budget import PrivacyBudget
from privmix.coordinator.coordinator import Coordinator
from privmix.coordinator.messages import Generation
from privmix.foundation.errors import CoordinatorStopping
from privmix.gateway.answers import Answer, CompletionStyle
from privmix.gateway.counters import Counters
from privmix.gateway.errors import from_coordinator
from privmix.gateway.response_queue import ResponseQueue
from privmix.gateway.streaming import stream_answer
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocols.pmixed import PMixed
from privmix.training import public_model
from tests.support.offline import offline

TERMS = PrivacyBudget(ensemble="e", epsilon=1e3, delta=1e-5, order=4.0, adjacency="user")


def test_a_stop_ends_a_stream_with_an_error_event(tmp_path: Path) -> None:
    async def run() -> None:
        coordinator, samples, ledger = offline(
            Coordinator, PMixed(2, 1.0, 0.4), TERMS, tmp_path / "ledger.db", public_model.resolve()
        )
        generation = Generation("endless", (504, 253), SamplingOptions(), 400, ignore_eos=True)

        @asynccontextmanager
        async def submit(generations: Sequence[Generation]) -> AsyncIterator[ResponseQueue]:
            queue = ResponseQueue(generations, 60, Counters(), 0.0)

            async def read() -> None:
                async with aclosing(coordinator.events("channel")) as batches:  # type: ignore[type-var]
                    async for batch in batches:
                        for delta in batch:
                            queue.put(delta)

            reading = asyncio.create_task(read())
            await coordinator.submit("channel", generations)
            yield queue
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

        answer = Answer(CompletionStyle(), "privmix", [generation], 2)
        written = []
        async for event in stream_answer(submit([generation]), answer, 0.0, include_usage=True):
            written.append(event)
            if len(written) == 3:
                await coordinator.close()
        last = json.loads(written[-1].decode().split("data: ")[-1])
        assert (last["error"]["code"], last["error"]["type"]) == ("service_stopping", "server_error")
        assert b"[DONE]" not in b"".join(written)
        assert sum(ledger.balance().charged.values()) >= samples.tokens >= answer.tokens > 0
        with pytest.raises(CoordinatorStopping) as refusal:
            await coordinator.submit("channel", [generation])
        assert from_coordinator(refusal.value).code == "service_stopping"

    asyncio.run(run())
