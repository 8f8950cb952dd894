"""Claim: streams survive the loss of coordinators, a shard, the fleet, the budget and its database.

The test kills the processes of real actors while eight answers are generated. Every answer completes, and each of its
tokens is charged once; of a step that a shard loses, the tokens whose points were drawn stay charged.
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

from privmix.budget import actor as budget
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reader import read
from privmix.coordinator.coordinator import CoordinatorActor, CoordinatorSettings
from privmix.coordinator.messages import Delta, Generation
from privmix.coordinator.text import Detokenizer, TextStream
from privmix.fleet.fleet import FleetActor, FleetSettings
from privmix.gateway.coordinator_client import CoordinatorClient
from privmix.privacy.mollifiers.shaping import SamplingOptions
from tests.ensembles import write_adapters
from tests.services.fleet.plans import SETTINGS, plans
from tests.support.ray_cluster import ray_cluster
from tests.support.rest import at_rest
from tests.tiny import write_tiny_model

NAMESPACE = "recovery"
COORDINATORS = ("coordinator", "coordinator-1")
PROMPT = (504, 253, 260)
STREAMS, TOKENS, LEASE = 8, 60, 4
AWAY_S = 3.0
# The time that a shard may take to restart on a busy machine.
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
        return await at_rest(self.charged)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("recovery")
    model, ledger = write_tiny_model(folder / "model"), folder / "ledger.db"
    adapters = write_adapters(folder / "parts", ["part-000"], model)
    with ray_cluster(4, namespace=NAMESPACE):
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


@asynccontextmanager
async def connected() -> AsyncIterator[CoordinatorClient]:
    client = CoordinatorClient(NAMESPACE, COORDINATORS, stall_timeout_s=PATIENCE_S + 30, recovery_s=PATIENCE_S)
    async with client.running(), asyncio.timeout(560):
        while client.connected < len(COORDINATORS):
            await asyncio.sleep(0.1)
        yield client


async def stream(client: CoordinatorClient, number: int) -> list[Delta]:
    generation = Generation(f"{number:032d}", PROMPT, SamplingOptions(top_k=200), TOKENS, ignore_eos=True)
    deltas: list[Delta] = []
    async with client.submit([generation]) as queue:
        while not queue.drained:
            deltas += await queue.take()
    return deltas


def processes(title: str) -> list[psutil.Process]:
    """Returns the processes that run actors of this class."""
    matches = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(f"ray::{title}"):
                matches.append(process)
    return matches


async def interrupt(service: Service, component: str) -> None:
    """Kills a process of this component, or moves the ledger's database away for some seconds."""
    if component == "all coordinators and the fleet":
        for process in processes("Coordinator") + processes("Fleet"):
            process.kill()
        return
    if component != "database":
        random.choice(processes(component)).kill()
        return
    moved = service.ledger.rename(service.ledger.with_suffix(".away"))
    await asyncio.sleep(AWAY_S)
    moved.rename(service.ledger)


def check(service: Service, streams: Sequence[Sequence[Delta]]) -> int:
    """Checks that every answer is complete and equals an uninterrupted one. Returns the number of released tokens."""
    detokenizer = Detokenizer.load(service.model)
    for deltas in streams:
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert len(tokens) == TOKENS
        text = TextStream(detokenizer, PROMPT, ignore_eos=True)
        expected = "".join(map(text.push, tokens)) + text.finish()
        assert "".join(delta.text for delta in deltas) == expected
    return STREAMS * TOKENS


@pytest.mark.parametrize(
    "component", ["Coordinator", "Shard", "Budget", "Fleet", "database", "all coordinators and the fleet"]
)
async def test_streams_complete_after_the_loss_of_a_component(service: Service, component: str) -> None:
    before = await service.settled()
    async with connected() as client:
        answering = [asyncio.create_task(stream(client, number)) for number in range(STREAMS)]
        await asyncio.sleep(1)
        lost = time.monotonic()
        await interrupt(service, component)
        assert not any(answer.done() for answer in answering)
        streams = await asyncio.gather(*answering)
        print(f"{component}: streams ended {time.monotonic() - lost:.1f} s after its loss")
    released = check(service, streams)
    charged = await service.settled() - before
    if component == "Coordinator":  # Its leases stay charged.
        assert released <= charged <= released + 2 * max(LEASE, 2 * STREAMS)
    elif component == "Shard":
        assert released <= charged <= released + STREAMS
    elif component == "all coordinators and the fleet":
        assert released <= charged
    else:
        assert charged == released
