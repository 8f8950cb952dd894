"""Streams go on when what they need is lost, with real actors: coordinators, shard, fleet, budget and its database.

The processes are killed without warning while eight answers grow. Every answer ends whole, and each of its tokens was
charged once.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray

from services.budget import actor as budget
from services.budget.privacy_budget import PrivacyBudget
from services.budget.reader import read
from services.coordinator.coordinator import CoordinatorActor, CoordinatorSettings
from services.coordinator.messages import Delta, Generation
from services.coordinator.text import Detokenizer, TextStream
from services.fleet.fleet import FleetActor, FleetSettings
from services.gateway.hub import Hub
from services.privacy.mollifiers.shaping import SamplingOptions
from tests.ensembles import write_adapters
from tests.services.fleet.plans import SETTINGS, plans
from tests.tiny import write_tiny_model

NAMESPACE = "continuing"
COORDINATORS = ("coordinator", "coordinator-1")
PROMPT = (504, 253, 260)
STREAMS, TOKENS, LEASE = 8, 60, 4
AWAY_S = 3.0
# How long a shard takes to start again on a machine that is busy with other tests.
PATIENCE_S = 300.0

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Service:
    model: Path
    ledger: Path

    def charged(self) -> int:
        return sum(read(self.ledger).charged.values())

    async def settled(self) -> int:
        """The tokens charged, once the coordinators are idle and have returned their leases."""
        before = -1
        while before != (charged := self.charged()):
            before = charged
            await asyncio.sleep(2)
        return charged


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("continuing")
    model, ledger = write_tiny_model(folder / "model"), folder / "ledger.db"
    adapters = write_adapters(folder / "parts", ["part-000"], model)
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE)
    try:
        fleet = FleetActor.options(name="fleet").remote(
            FleetSettings(NAMESPACE, plans(model, adapters), SETTINGS, None, COORDINATORS), 1
        )
        ray.get(fleet.start.remote())
        terms = PrivacyBudget(ensemble="e", epsilon=1000.0, delta=1e-5, order=4.0, adjacency="user")
        budget.start(str(ledger), terms, namespace=NAMESPACE, lifetime="detached")
        for name in COORDINATORS:
            others = tuple(other for other in COORDINATORS if other != name)
            chosen = CoordinatorSettings(
                model,
                NAMESPACE,
                budget.NAME,
                peers=others,
                lease_tokens=LEASE,
                pace_s=0.05,
                step_timeout_s=20.0,
                recovery_s=PATIENCE_S,
            )
            ray.get(CoordinatorActor.options(name=name, num_cpus=0, lifetime="detached").remote(chosen).health.remote())
        yield Service(model, ledger)
    finally:
        ray.shutdown()


@asynccontextmanager
async def connected() -> AsyncIterator[Hub]:
    hub = Hub(NAMESPACE, COORDINATORS, stall_timeout_s=PATIENCE_S + 30, recovery_s=PATIENCE_S)
    async with hub.running(), asyncio.timeout(560):
        while hub.connected < len(COORDINATORS):
            await asyncio.sleep(0.1)
        yield hub


async def stream(hub: Hub, number: int) -> list[Delta]:
    generation = Generation(f"{number:032d}", PROMPT, SamplingOptions(top_k=200), TOKENS, ignore_eos=True)
    deltas: list[Delta] = []
    async with hub.submit([generation]) as mailbox:
        while not mailbox.drained:
            deltas += await mailbox.take()
    return deltas


def processes(title: str) -> list[psutil.Process]:
    """Those that run actors of this class."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(f"ray::{title}"):
                found.append(process)
    return found


async def lose(service: Service, what: str) -> None:
    if what != "database":
        random.choice(processes(what)).kill()
        return
    away = service.ledger.rename(service.ledger.with_suffix(".away"))
    await asyncio.sleep(AWAY_S)
    away.rename(service.ledger)


def check(service: Service, streams: Sequence[Sequence[Delta]]) -> int:
    """Every answer is whole, and reads as one that nothing interrupted; returns the tokens released."""
    detokenizer = Detokenizer.load(service.model)
    for deltas in streams:
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert len(tokens) == TOKENS
        text = TextStream(detokenizer, PROMPT, ignore_eos=True)
        expected = "".join(map(text.push, tokens)) + text.finish()
        assert "".join(delta.text for delta in deltas) == expected
    return STREAMS * TOKENS


@pytest.mark.parametrize("lost", ["Coordinator", "Shard", "Budget", "Fleet", "database"])
async def test_streams_end_whole(service: Service, lost: str) -> None:
    before = await service.settled()
    async with connected() as hub:
        answering = [asyncio.create_task(stream(hub, number)) for number in range(STREAMS)]
        await asyncio.sleep(1)
        began = time.monotonic()
        await lose(service, lost)
        assert not any(answer.done() for answer in answering)
        streams = await asyncio.gather(*answering)
        print(f"{lost}: streams ended {time.monotonic() - began:.1f} s after it")
    released = check(service, streams)
    charged = await service.settled() - before
    if lost == "Coordinator":  # its leases stay charged
        assert released <= charged <= released + 2 * max(LEASE, 2 * STREAMS)
    else:
        assert charged == released


async def test_streams_end_whole_when_every_coordinator_is_lost_with_the_fleet(service: Service) -> None:
    before = await service.settled()
    async with connected() as hub:
        answering = [asyncio.create_task(stream(hub, number)) for number in range(STREAMS)]
        await asyncio.sleep(1)
        for process in processes("Coordinator") + processes("Fleet"):
            process.kill()
        streams = await asyncio.gather(*answering)
    released = check(service, streams)
    assert released <= await service.settled() - before
