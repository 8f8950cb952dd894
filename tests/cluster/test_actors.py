"""Claim: on a small service's real actors, streams survive each loss, and the checker finds faults that are put in.

The service has real shards, a real ledger, real keys and two coordinators; others have one method that is wrong.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import psutil
import pytest
import ray

from privmix.budget import actor as budget
from privmix.budget.client import Reservation
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.coordinator.coordinator import Coordinator, CoordinatorActor, CoordinatorSettings
from privmix.coordinator.messages import Delta, Generation
from privmix.coordinator.sequence import LiveSequence
from privmix.coordinator.step import Costs
from privmix.fleet.fleet import FleetActor, FleetSettings
from privmix.fleet.shard_map import Size
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

NAMESPACE = "actors"
TOKENS, STREAMS, LEASE = 20, 3, 4
LONG, MANY = 60, 8
"""The tokens and the streams during which something is lost."""
AWAY_S = 3.0
PATIENCE_S = 300.0
"""The time that a shard may take to restart on a busy machine."""

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]


class ChargesTwice(Coordinator):
    """Charges every released token twice."""

    async def _charge(self, costs: Costs, paying: Sequence[int], reserved: Reservation) -> int:
        released = await super()._charge(costs, paying, reserved)
        async with self._budget.reserve(self._protocol.event, released, parts=self._protocol.parts) as again:
            again.mark_released(released)
        return released


class ChargesNothing(Coordinator):
    """Returns every released token to the budget."""

    async def _charge(self, costs: Costs, paying: Sequence[int], reserved: Reservation) -> int:
        released = await super()._charge(costs, paying, reserved)
        reserved.released = 0
        return released


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
CORRECT = ("correct", "second")
COORDINATORS = "all coordinators and the fleet"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The ledger of the service."""
    folder = tmp_path_factory.mktemp("actors")
    model, ledger = write_counting_model(folder / "model"), folder / "ledger.db"
    plan = plans(model, write_adapters(folder / "parts", ["part-000"], model))
    with ray_cluster(4, namespace=NAMESPACE):
        settings = FleetSettings(NAMESPACE, plan, SETTINGS, None, (*CORRECT, *FAULTY))
        fleet = FleetActor.options(name="fleet").remote(settings, Size(1))
        ray.get(fleet.start.remote())
        terms = PrivacyBudget(ensemble="e", epsilon=1000.0, delta=1e-5, order=4.0, adjacency="user")
        budget.start(str(ledger), terms, namespace=NAMESPACE, lifetime="detached")
        keys.start(str(folder / "keys.db"), namespace=NAMESPACE, lifetime="detached")
        actors = {name: ray.remote(max_concurrency=64)(class_) for name, class_ in FAULTY.items()}
        for name, class_ in {**dict.fromkeys(CORRECT, CoordinatorActor), **actors}.items():
            chosen = CoordinatorSettings(
                model,
                NAMESPACE,
                budget.NAME,
                peers=tuple(other for other in CORRECT if other != name),
                lease_tokens=LEASE,
                pace_s=0.05,
                step_timeout_s=20.0,
                recovery_s=PATIENCE_S,
            )
            started = class_.options(name=name, num_cpus=0, lifetime="detached").remote(chosen)
            ray.get(started.load.remote())  # steps wait for a shard that is slow to answer
        yield ledger


async def at_rest(ledger: Path) -> Charges:
    """Returns the charges, once two readings two seconds apart are equal."""
    before = None
    while before != (now := Charges.of(ledger)):
        before = now
        await asyncio.sleep(2)
    return now


@asynccontextmanager
async def connected(*coordinators: str) -> AsyncIterator[CoordinatorClient]:
    client = CoordinatorClient(NAMESPACE, coordinators, stall_timeout_s=PATIENCE_S + 30, recovery_s=PATIENCE_S)
    async with client.running(), asyncio.timeout(560):
        while client.connected < len(coordinators):
            await asyncio.sleep(0.1)
        yield client


async def heard(client: CoordinatorClient, start: int, tokens: int = TOKENS) -> Transcript:
    """Returns the transcript of one generation, with the coordinator's count of tokens in each chunk."""
    generation = Generation(f"{start:032d}", (start,), SamplingOptions(), tokens)
    deltas: list[Delta] = []
    async with client.submit([generation]) as queue:
        while not queue.drained:
            deltas += await queue.take()
    chunks = (Chunk(delta.text, sum(each.tokens for each in deltas[:at])) for at, delta in enumerate(deltas, start=1))
    return Transcript(start, tokens, tuple(chunks), deltas[-1].finish_reason)


async def violations(ledger: Path, coordinator: str) -> list[str]:
    """Returns what the checker says about streams of this coordinator."""
    before = await at_rest(ledger)
    async with connected(coordinator) as client:
        streams = await asyncio.gather(*(heard(client, 100 * number) for number in range(STREAMS)))
    return [*text_violations(streams), *charge_violations(before, await at_rest(ledger), streams)]


async def test_a_correct_coordinator_has_no_violation(ledger: Path) -> None:
    assert await violations(ledger, CORRECT[0]) == []


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (ChargesTwice, f"the ledger charged {2 * STREAMS * TOKENS} tokens for {STREAMS * TOKENS} received"),
        (ChargesNothing, f"the ledger charged 0 tokens, and clients received {STREAMS * TOKENS}"),
        (LosesText, "skips to"),
        (RepeatsText, "repeats"),
    ],
)
async def test_a_faulty_coordinator_is_found(ledger: Path, fault: type[Coordinator], found: str) -> None:
    reported = await violations(ledger, fault.__name__)
    assert any(found in violation for violation in reported), reported


async def test_whatever_is_sampled_is_charged_although_clients_leave(ledger: Path) -> None:
    """Clients leave after each number of deltas; the tokens on their way are charged to the ledger and to the key."""
    coordinator = ray.get_actor(CORRECT[0], NAMESPACE)
    await coordinator.measures.remote()
    before, shares = await at_rest(ledger), []

    async def leave(start: int, heard: int) -> None:
        async def settle(used: int | None) -> None:
            shares.append(used)

        generation = Generation(f"{start:032d}", (start,), SamplingOptions(), TOKENS)
        async with client.submit([generation], on_end=settle) as queue:
            for _ in range(heard):
                await queue.take()

    async with connected(CORRECT[0]) as client:
        await asyncio.gather(*(leave(100 + 10 * heard, heard) for heard in range(8)))
        while len(shares) < 8:
            await asyncio.sleep(0.1)
    after, measures = await at_rest(ledger), await coordinator.measures.remote()
    assert sum(used for used in shares if used is not None) == measures["sampled"] == after.tokens - before.tokens
    assert None not in shares


async def lose(ledger: Path, component: str) -> None:
    """Kills a process of this component, or moves the ledger's database away for some seconds."""
    if component == "database":
        moved = ledger.rename(ledger.with_suffix(".away"))
        await asyncio.sleep(AWAY_S)
        moved.rename(ledger)
        return
    titles = ("Coordinator", "Fleet") if component == COORDINATORS else (component,)
    running = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(tuple(f"ray::{title}" for title in titles)):
                running.append(process)
    for process in running if component == COORDINATORS else [random.choice(running)]:
        process.kill()


MOST = {"Coordinator": 2 * max(LEASE, 2 * MANY), COORDINATORS: 6 * max(LEASE, 2 * MANY), "Shard": MANY}
"""The tokens that a loss may leave charged: leases of coordinators, and one step of which the shard named no token."""


@pytest.mark.parametrize("component", ["Coordinator", "Shard", "Budget", "Fleet", "database", COORDINATORS])
async def test_streams_complete_after_the_loss_of_a_component(ledger: Path, component: str) -> None:
    before = await at_rest(ledger)
    async with connected(*CORRECT) as client:
        answering = [asyncio.create_task(heard(client, 100 * number, LONG)) for number in range(MANY)]
        await asyncio.sleep(1)
        await lose(ledger, component)
        assert not any(answer.done() for answer in answering)
        streams = await asyncio.gather(*answering)
    assert [stream.end for stream in streams] == ["length"] * MANY
    assert text_violations(streams) == []
    assert 0 <= (await at_rest(ledger)).tokens - before.tokens - MANY * LONG <= MOST.get(component, 0)
