"""Claim: engines that share a GPU start one after another, because each measures the memory that is free there."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import ray
from ray.actor import ActorHandle

from services.fleet.fleet import Fleet, FleetSettings
from services.fleet.plan import ShardPlan
from tests.ensembles import write_adapters
from tests.services.fleet.plans import SETTINGS, plans
from tests.support.ray_cluster import ray_cluster
from tests.tiny import write_tiny_model


class RecordingFleet(Fleet):
    """Records when it starts a shard and when shards answer."""

    def __init__(self, settings: FleetSettings, shards: int) -> None:
        super().__init__(settings, shards)
        self._events: list[str] = []

    def _actors(self, plan: ShardPlan) -> Iterator[ActorHandle]:
        for actor, name in zip(super()._actors(plan), plan.shards, strict=True):
            self._events.append(f"{name} starts")
            yield actor

    async def _wait_for(self, actors: Sequence[ActorHandle]) -> None:
        await super()._wait_for(actors)
        self._events.append(f"{len(actors)} answer")

    async def events(self) -> list[str]:
        return self._events


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardPlan]:
    """One part group of two copies, on a cluster that says that it has a GPU."""
    folder = tmp_path_factory.mktemp("sharing")
    model = write_tiny_model(folder / "model")
    with ray_cluster(2, num_gpus=1):
        (plan,) = plans(model, write_adapters(folder / "parts", ["part-000"], model), copies=2)
        yield plan


@pytest.mark.parametrize("num_gpus", [0.5, 0.0])
def test_engines_on_one_gpu_start_one_after_another(planned: ShardPlan, num_gpus: float) -> None:
    plan = replace(planned, num_gpus=num_gpus)
    first, second = plan.shards
    settings = FleetSettings(f"sharing-{num_gpus}", (plan,), SETTINGS, None, ())
    fleet = ray.remote(num_cpus=0)(RecordingFleet).remote(settings, 1)
    ray.get(fleet.start.remote())
    one_by_one = [f"{first} starts", "1 answer", f"{second} starts", "1 answer", "2 answer"]
    together = [f"{first} starts", f"{second} starts", "2 answer"]
    assert ray.get(fleet.events.remote()) == (one_by_one if num_gpus else together)
    ray.get(fleet.close.remote())
