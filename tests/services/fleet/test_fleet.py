"""Claim: the ensemble grows and shrinks between tokens while it answers, and no part counts twice."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle

from privmix.budget import actor as budget
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.coordinator.coordinator import Coordinator, CoordinatorActor, CoordinatorSettings
from privmix.coordinator.messages import Delta, Generation
from privmix.engine.adapter_config import CONFIG_FILE
from privmix.fleet.fleet import FleetActor, FleetSettings
from privmix.fleet.plan import ShardPlan
from privmix.fleet.shard_map import PartGroup, ShardMap, Size
from privmix.fleet.size import StoredSize
from privmix.foundation.errors import FleetError
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocols.pmixed import PMixed, RatioEvent
from tests.ensembles import write_adapters
from tests.services.fleet.plans import SETTINGS, plans
from tests.support.ray_cluster import ray_cluster

PARTS = 3
PROMPT = (504, 253, 260)


@dataclass(frozen=True)
class Running:
    """A fleet and a ledger in a Ray namespace of their own."""

    namespace: str
    fleet: ActorHandle
    stored: StoredSize
    ledger: Path
    coordinator: CoordinatorSettings

    def living(self) -> set[str]:
        actors = ray.util.list_named_actors(all_namespaces=True)
        named = {actor["name"] for actor in actors if actor["namespace"] == self.namespace}
        return {name for name in named if name.startswith("shard")}

    def charged(self) -> Counter[Any]:
        return Counter(read(self.ledger).charged)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, public_model: Path) -> dict[str, Path]:
    names = [f"part-{index:03d}" for index in range(PARTS)]
    return write_adapters(tmp_path_factory.mktemp("fleet"), names, public_model)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster(4):
        yield


@pytest.fixture(scope="module")
def running(
    cluster: None, adapters: dict[str, Path], public_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    yield from _running("fleet-tests", plans(public_model, adapters), tmp_path_factory.mktemp("fleet"), Size(1))


@pytest.fixture
def copied(cluster: None, adapters: dict[str, Path], public_model: Path, tmp_path: Path) -> Iterator[Running]:
    yield from _running("fleet-copies", plans(public_model, adapters)[:1], tmp_path, Size(1, copies=2))


def _running(namespace: str, plans: tuple[ShardPlan, ...], folder: Path, size: Size) -> Iterator[Running]:
    settings = FleetSettings(namespace, plans, SETTINGS, None, ("coordinator",))
    stored = StoredSize(str(folder / "database" / "keys.db"), namespace, size)
    Path(stored.database).parent.mkdir()
    fleet = FleetActor.options(name="fleet", namespace=namespace).remote(settings, size, stored)
    ray.get(fleet.shard_map.remote())
    begun = fleet.begun.remote()
    assert ray.wait([begun], timeout=0)[0] == [], "gateways wait until the parts are loaded"
    ray.get(fleet.start.remote())
    ray.get(begun)
    terms = PrivacyBudget(ensemble="e", epsilon=8.0, delta=1e-5, order=4.0, adjacency="part, add or remove")
    keeper = budget.start(str(folder / "ledger.db"), terms, namespace=namespace)
    chosen = CoordinatorSettings(plans[0].engine.model, namespace, budget.NAME, lease_tokens=4, patience_s=0.5)
    yield Running(namespace, fleet, stored, folder / "ledger.db", chosen)
    ray.get(fleet.close.remote())
    ray.kill(fleet)
    ray.kill(keeper)


async def collect(coordinator: Coordinator, line: str, sequences: int, tokens: int) -> list[Delta]:
    options = SamplingOptions(top_k=100)
    await coordinator.submit(line, [Generation(f"{line}-{n}", PROMPT, options, tokens) for n in range(sequences)])
    deltas: list[Delta] = []
    async for batch in coordinator.events(line):
        deltas += batch
        if sum(delta.finish_reason is not None for delta in deltas) == sequences:
            return deltas
    raise AssertionError("the line ended before the generations")


@pytest.mark.slow
def test_parts_join_and_leave_under_running_streams(running: Running) -> None:
    tokens, ids = 400, [f"stream-{number}" for number in range(8)]
    ray.get(running.fleet.scale.remote(2))
    coordinator = CoordinatorActor.options(name="coordinator", namespace=running.namespace, num_cpus=0).remote(
        running.coordinator
    )
    generations = [Generation(id_, PROMPT, SamplingOptions(top_k=100), tokens) for id_ in ids]
    events = coordinator.events.remote("line")
    ray.get(coordinator.submit.remote("line", generations))
    deltas: list[Delta] = ray.get(next(events))
    for shards, copies in ((3, 1), (1, 2)):
        shard_map = ray.get(running.fleet.scale.remote(shards, copies))
        assert shard_map.protocol.parts == shards
        charged_before = running.charged().total()
        while sum(delta.charged for delta in deltas) <= charged_before:
            deltas += ray.get(next(events))
        assert sum(delta.finish_reason is not None for delta in deltas) < len(ids), "streams go on"
    ray.get(coordinator.cancel.remote(ids))
    while sum(delta.finish_reason is not None for delta in deltas) < len(ids):
        deltas += ray.get(next(events))
    ray.get(coordinator.close.remote())
    ray.kill(coordinator)
    assert {delta.finish_reason for delta in deltas} <= {None, "cancelled", "stop"}
    charged = running.charged()
    assert charged.total() == sum(delta.charged for delta in deltas)
    assert {event.parts for event in charged} == {2, 3, 1}, "each event has the number of parts of its tokens"
    assert len({event.radius for event in charged}) == 3, "each number of parts has its own radius"
    assert running.living() == {"shard-000", "shard-000-copy-1"}


@pytest.mark.slow
def test_an_impossible_size_changes_nothing(running: Running, adapters: dict[str, Path]) -> None:
    before, living = ray.get(running.fleet.shard_map.remote()), running.living()
    for shards in (0, PARTS + 1):
        with pytest.raises(FleetError, match="1 to 3"):
            ray.get(running.fleet.scale.remote(shards))
    database = Path(running.stored.database)
    hidden = database.parent.rename(database.parent.with_suffix(".hidden"))
    with pytest.raises(FleetError, match="there is no directory"):
        ray.get(running.fleet.scale.remote(2))
    hidden.rename(database.parent)
    config = adapters["part-002"] / CONFIG_FILE
    written = config.rename(config.with_suffix(".kept"))
    config.write_text("{}")
    with pytest.raises(FleetError) as refused:
        ray.get(running.fleet.scale.remote(3))
    written.rename(config)
    reason = str(getattr(refused.value, "cause", None))
    assert reason == "a shard could not be started: adapter 'part-002', adapter_config.json: peft_type: Field required"
    assert ray.get(running.fleet.shard_map.remote()) == before
    assert running.living() == living


@pytest.mark.slow
def test_a_restarted_fleet_recovers_its_shards(running: Running) -> None:
    grown = ray.get(running.fleet.scale.remote(2, 3))
    assert running.stored.read() == Size(2, 3), "for the next deployment"
    ray.kill(running.fleet, no_restart=False)
    while (restored := ray.get(running.fleet.shard_map.remote())).version == grown.version:
        time.sleep(0.1)  # the old actor still answers
    assert (restored.protocol, restored.groups) == (grown.protocol, grown.groups)
    assert restored.version > grown.version
    ray.get(running.fleet.begun.remote())
    assert all(shard["answers"] for shard in ray.get(running.fleet.status.remote())["shards"])
    ray.get(running.fleet.scale.remote(1, 1))
    assert running.living() == {"shard-000"}


@pytest.mark.slow
def test_coordinators_follow_a_fleet_whose_clock_was_put_back(running: Running) -> None:
    """A coordinator keeps the later of two maps, so the fleet gives its map a version above the coordinator's."""
    ray.get(running.fleet.scale.remote(2))
    coordinator = CoordinatorActor.options(name="coordinator", namespace=running.namespace, num_cpus=0).remote(
        running.coordinator
    )

    def serves(parts: int) -> bool:
        before, line = running.charged(), f"line-{time.monotonic_ns()}"
        events = coordinator.events.remote(line)
        ray.get(coordinator.submit.remote(line, [Generation(line, PROMPT, SamplingOptions(top_k=100), 1)]))
        assert ray.get(next(events))[-1].finish_reason is not None
        return {event.parts for event in running.charged() - before} == {parts}

    two = ray.get(running.fleet.shard_map.remote())
    ahead = replace(two, version=two.version + 10**18)
    assert ray.get(coordinator.update_shards.remote(ahead)) == ahead.version
    three = ray.get(running.fleet.scale.remote(3))
    assert three.version > ahead.version
    assert serves(3)

    one = ray.get(running.fleet.scale.remote(1))
    lost = replace(two, version=one.version + 10**18)
    ray.get(coordinator.update_shards.remote(lost))
    ray.kill(running.fleet, no_restart=False)
    while ray.get(running.fleet.shard_map.remote()).version <= lost.version:
        time.sleep(0.1)  # until the restarted fleet has published its map, which nobody asked for
    assert serves(1)
    ray.get(coordinator.close.remote())
    ray.kill(coordinator)


@pytest.mark.slow
def test_a_shard_whose_adapter_is_gone_says_what_to_do(running: Running, adapters: dict[str, Path]) -> None:
    """A training removes the adapters that it replaces, also those that a service would start again with."""

    def until(answers: bool) -> str | None:
        while (shard := ray.get(running.fleet.status.remote())["shards"][0])["answers"] != answers:
            time.sleep(0.2)
        return shard["trouble"]

    ray.get(running.fleet.scale.remote(1))
    directory = adapters["part-000"]
    moved = directory.rename(directory.with_name("moved"))
    ray.kill(ray.get_actor("shard-000", running.namespace))
    assert "its adapter part-000 is gone: the ensemble was trained again" in (until(answers=False) or "")
    moved.rename(directory)
    assert until(answers=True) is None


@pytest.mark.slow
def test_a_copy_replaces_a_hung_copy_and_no_part_counts_twice(copied: Running) -> None:
    shard_map = ray.get(copied.fleet.shard_map.remote())
    assert (shard_map.shards, shard_map.protocol.parts) == (("shard-000", "shard-000-copy-1"), 1)
    hanging = ray.get(ray.get_actor("shard-000-copy-1", copied.namespace).status.remote()).process

    async def serve() -> list[Delta]:
        coordinator = Coordinator(copied.coordinator)
        await collect(coordinator, "before", 4, 2)
        os.kill(hanging, signal.SIGSTOP)
        deltas = await collect(coordinator, "after", 6, 3)
        await coordinator.close()
        return deltas

    try:
        deltas = asyncio.run(serve())
    finally:
        os.kill(hanging, signal.SIGCONT)
    assert {delta.finish_reason for delta in deltas} - {None} == {"length"}
    assert {event.parts for event in copied.charged()} == {1}


def test_a_shard_map_serves_every_model_once() -> None:
    protocol = PMixed(2, 0.5, 0.4)
    blocks = (PartGroup(0, {0: "part-000"}, ("shard-000",)), PartGroup(1, {1: "part-001"}, ("shard-001",)))
    assert ShardMap(1, protocol, blocks).shards == ("shard-000", "shard-001")
    for wrong in (blocks[:1], (*blocks, replace(blocks[1], index=2)), (blocks[0], replace(blocks[0], index=1))):
        with pytest.raises(ValueError, match="draws from the first 2"):
            ShardMap(1, protocol, wrong)
    assert protocol.event == RatioEvent(2, 0.5, 0.4)
