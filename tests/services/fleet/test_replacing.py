"""Claim: the fleet detects, kills and restarts a shard that hangs, and its waiting streams continue."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import ray

from privmix.budget import actor as budget
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.coordinator.coordinator import Coordinator, CoordinatorSettings
from privmix.coordinator.messages import Delta, Generation
from privmix.fleet.fleet import FleetActor, FleetSettings
from privmix.fleet.shard_map import Size
from privmix.foundation.errors import CoordinatorUnavailable
from privmix.privacy.mollifiers.shaping import SamplingOptions
from tests.ensembles import write_adapters
from tests.services.fleet.plans import SETTINGS, plans
from tests.support.ray_cluster import ray_cluster
from tests.tiny import write_tiny_model

NAMESPACE = "replacing"
STALLED_S = 5.0
TOKENS = 100

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("lost", ["hangs", "hangs while the fleet restarts", "is killed for good"])
def test_streams_continue_with_the_shard_that_the_fleet_restarts(tmp_path: Path, lost: str) -> None:
    model = write_tiny_model(tmp_path / "model")
    adapters = write_adapters(tmp_path / "parts", ["part-000"], model)
    with ray_cluster(4, namespace=NAMESPACE):
        settings = FleetSettings(NAMESPACE, plans(model, adapters), SETTINGS, None, (), stalled_s=STALLED_S)
        fleet = FleetActor.options(name="fleet", namespace=NAMESPACE).remote(settings, Size(1))
        ray.get(fleet.start.remote())
        terms = PrivacyBudget(ensemble="e", epsilon=100.0, delta=1e-5, order=4.0, adjacency="user")
        budget.start(str(tmp_path / "ledger.db"), terms, namespace=NAMESPACE, lifetime="detached")
        chosen = CoordinatorSettings(model, NAMESPACE, budget.NAME, step_timeout_s=STALLED_S)
        deltas = asyncio.run(_interrupted(chosen, lost))
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert sum(delta.tokens for delta in deltas) == TOKENS
    assert sum(read(tmp_path / "ledger.db").charged.values()) == TOKENS


async def _interrupted(settings: CoordinatorSettings, lost: str) -> list[Delta]:
    """Returns all deltas of a stream whose shard is lost after the first deltas."""
    coordinator = Coordinator(settings)
    await coordinator.health()
    generation = Generation("stream", (504, 253, 260), SamplingOptions(top_k=100), TOKENS)
    await coordinator.submit("channel", [generation])
    deltas: list[Delta] = []
    async for batch in coordinator.events("channel"):
        if not deltas:
            await _lose(lost)
            watching = asyncio.create_task(_sick(coordinator))
        deltas += batch
        if deltas[-1].finish_reason is not None:
            break
    assert await watching, "the health check fails while the shard is lost"
    await coordinator.health()
    await coordinator.close()
    return deltas


async def _lose(lost: str) -> None:
    shard = ray.get_actor("shard-000", NAMESPACE)
    if lost == "is killed for good":
        ray.kill(shard)
        return
    os.kill((await shard.status.remote()).process, signal.SIGSTOP)
    if lost == "hangs while the fleet restarts":
        ray.kill(ray.get_actor("fleet", NAMESPACE), no_restart=False)


async def _sick(coordinator: Coordinator) -> bool:
    """Waits for the coordinator's health check to fail; tells whether it did before the stream continued."""
    for _ in range(100):
        try:
            await asyncio.wait_for(coordinator.health(), 2.0)
        except (CoordinatorUnavailable, TimeoutError):
            return True
        await asyncio.sleep(0.05)
    return False
