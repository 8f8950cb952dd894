"""Claim: engines that share a GPU start one after another, because each measures the memory that is free there."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray.actor import ActorHandle

from privmix.fleet.fleet import Fleet, FleetSettings
from privmix.fleet.shard_map import Size
from privmix.shards.shard import ShardStatus
from tests.services.fleet.plans import SETTINGS, plans
from tests.support.ray_cluster import ray_cluster


class Shard:
    """Stands for a shard, without an engine."""

    def status(self) -> Any:
        return SimpleNamespace(node="one")


class RecordingFleet(Fleet):
    """Records when it starts a shard and when shards answer."""

    def __init__(self, settings: FleetSettings, size: Size) -> None:
        super().__init__(settings, size)
        self._events: list[str] = []

    def _actor(self, name: str) -> ActorHandle:
        self._events.append(f"{name} starts")
        return ray.remote(num_cpus=0)(Shard).remote()

    async def _wait_for(self, actors: Sequence[ActorHandle]) -> list[ShardStatus]:
        statuses = await super()._wait_for(actors)
        self._events.append(f"{len(actors)} answer")
        return statuses

    async def events(self) -> list[str]:
        return self._events


def test_engines_on_one_gpu_start_one_after_another(tmp_path: Path) -> None:
    """And nothing waits for an engine that has no part of a GPU."""
    apart, sharing = plans(tmp_path, {"part-000": tmp_path, "part-001": tmp_path})
    sharing = replace(sharing, num_gpus=0.5)
    settings = FleetSettings("sharing", (apart, sharing), SETTINGS, None, ())
    with ray_cluster(1):
        fleet = ray.remote(num_cpus=0)(RecordingFleet).remote(settings, Size(2, copies=2))
        ray.get(fleet.start.remote())
        events = ray.get(fleet.events.remote())
    alone, copy, first, second = (f"{name} starts" for plan in settings.plans for name in plan.shards(2))
    assert events == [alone, copy, first, "1 answer", second, "1 answer", "4 answer"]
