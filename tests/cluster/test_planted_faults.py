"""Claim: the fault checker finds faults that are put into the real actors of a small service.

Each service has real shards, a real ledger, real keys, and one method that is wrong on purpose.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest
import ray

from privmix.budget import actor as budget
from privmix.budget.client import Reservation
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.coordinator.coordinator import Coordinator, CoordinatorActor, CoordinatorSettings
from privmix.coordinator.messages import Delta, Generation
from privmix.coordinator.sequence import LiveSequence
from privmix.fleet.fleet import FleetActor, FleetSettings
from privmix.gateway.coordinator_client import CoordinatorClient
from privmix.keys import actor as keys
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.structure.matcher import Position
from tests.cluster.charges import Charges
from tests.cluster.clients import Chunk, Transcript
from tests.cluster.invariants import charge_violations, text_violations
from tests.counting import write_counting_model
from tests.ensembles import write_adapters
from tests.services.fleet.plans import SETTINGS, plans
from tests.support.ray_cluster import ray_cluster
from tests.support.rest import at_rest

NAMESPACE = "planted"
TOKENS, STREAMS = 20, 3
PATIENCE_S = 120.0

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]


class ChargesTwice(Coordinator):
    """Charges every released token twice."""

    async def _advance(self, batch: list[LiveSequence], reserved: Reservation) -> None:
        await super()._advance(batch, reserved)
        released = reserved.released
        async with self._budget.reserve(self._protocol.event, released, parts=self._protocol.parts) as again:
            again.mark_released(released)


class ChargesNothing(Coordinator):
    """Returns every released token to the budget."""

    async def _advance(self, batch: list[LiveSequence], reserved: Reservation) -> None:
        await super()._advance(batch, reserved)
        reserved.released = 0


class LosesText(Coordinator):
    """Loses the text of every tenth token."""

    times = 0

    def __init__(self, settings: CoordinatorSettings) -> None:
        super().__init__(settings)
        self._numbers = count(1)

    def _accept(self, live: LiveSequence, token: int, position: Position | None) -> Delta:
        delta = super()._accept(live, token, position)
        return delta if next(self._numbers) % 10 else replace(delta, text=self.times * delta.text)


class RepeatsText(LosesText):
    """Sends the text of every tenth token twice."""

    times = 2


FAULTY = {class_.__name__: class_ for class_ in (ChargesTwice, ChargesNothing, LosesText, RepeatsText)}
CORRECT = "Coordinator"


@dataclass(frozen=True)
class Service:
    model: Path
    ledger: Path
    keys: Path

    async def charges_at_rest(self) -> Charges:
        return await at_rest(lambda: Charges.of(self.ledger))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("planted")
    place = Service(write_counting_model(folder / "model"), folder / "ledger.db", folder / "keys.db")
    adapters = write_adapters(folder / "parts", ["part-000"], place.model)
    with ray_cluster(4, namespace=NAMESPACE):
        coordinators = (CORRECT, *FAULTY)
        plan = plans(place.model, adapters)
        fleet = FleetActor.options(name="fleet").remote(FleetSettings(NAMESPACE, plan, SETTINGS, None, coordinators), 1)
        ray.get(fleet.start.remote())
        terms = PrivacyBudget(ensemble="e", epsilon=1000.0, delta=1e-5, order=4.0, adjacency="user")
        budget.start(str(place.ledger), terms, namespace=NAMESPACE, lifetime="detached")
        keys.start(str(place.keys), namespace=NAMESPACE, lifetime="detached")
        settings = CoordinatorSettings(place.model, NAMESPACE, budget.NAME, lease_tokens=4)
        actors = {name: ray.remote(max_concurrency=64)(class_) for name, class_ in FAULTY.items()}
        for name, class_ in {CORRECT: CoordinatorActor, **actors}.items():
            started = class_.options(name=name, num_cpus=0, lifetime="detached").remote(settings)
            ray.get(started.load.remote())  # steps wait for a shard that is slow to answer
        yield place


@asynccontextmanager
async def connected(coordinator: str) -> AsyncIterator[CoordinatorClient]:
    client = CoordinatorClient(NAMESPACE, (coordinator,), stall_timeout_s=PATIENCE_S, recovery_s=PATIENCE_S)
    async with client.running(), asyncio.timeout(PATIENCE_S):
        while not client.connected:
            await asyncio.sleep(0.1)
        yield client


async def heard(client: CoordinatorClient, start: int) -> Transcript:
    """Returns the transcript of one generation, with the coordinator's count of tokens in each chunk."""
    generation = Generation(f"{start:032d}", (start,), SamplingOptions(), TOKENS)
    deltas: list[Delta] = []
    async with client.submit([generation]) as queue:
        while not queue.drained:
            deltas += await queue.take()
    chunks = (Chunk(delta.text, sum(each.tokens for each in deltas[:at])) for at, delta in enumerate(deltas, start=1))
    return Transcript(start, TOKENS, tuple(chunks), deltas[-1].finish_reason)


async def violations(service: Service, coordinator: str) -> list[str]:
    """Returns what the checker says about streams of this coordinator."""
    before = await service.charges_at_rest()
    async with connected(coordinator) as client:
        streams = await asyncio.gather(*(heard(client, 100 * number) for number in range(STREAMS)))
    after = await service.charges_at_rest()
    return [*text_violations(streams), *charge_violations(before, after, streams)]


async def test_a_correct_coordinator_has_no_violation(service: Service) -> None:
    assert await violations(service, CORRECT) == []


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (ChargesTwice, f"the ledger charged {2 * STREAMS * TOKENS} tokens for {STREAMS * TOKENS} received"),
        (ChargesNothing, f"the ledger charged 0 tokens, and clients received {STREAMS * TOKENS}"),
        (LosesText, "skips to"),
        (RepeatsText, "repeats"),
    ],
)
async def test_a_faulty_coordinator_is_found(service: Service, fault: type[Coordinator], found: str) -> None:
    reported = await violations(service, fault.__name__)
    assert any(found in violation for violation in reported), reported


async def test_whatever_is_sampled_is_charged_although_clients_leave(service: Service) -> None:
    """Clients leave after each number of deltas; the tokens on their way are charged to the ledger and to the key."""
    coordinator = ray.get_actor(CORRECT, NAMESPACE)
    await coordinator.measures.remote()
    before, shares = await service.charges_at_rest(), []

    async def leave(start: int, heard: int) -> None:
        async def settle(used: int | None) -> None:
            shares.append(used)

        generation = Generation(f"{start:032d}", (start,), SamplingOptions(), TOKENS)
        async with client.submit([generation], on_end=settle) as queue:
            for _ in range(heard):
                await queue.take()

    async with connected(CORRECT) as client:
        await asyncio.gather(*(leave(100 + 10 * heard, heard) for heard in range(8)))
        while len(shares) < 8:
            await asyncio.sleep(0.1)
    after, measures = await service.charges_at_rest(), await coordinator.measures.remote()
    assert sum(used for used in shares if used is not None) == measures["sampled"] == after.tokens - before.tokens
    assert None not in shares
