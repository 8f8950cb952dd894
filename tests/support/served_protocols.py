"""Coordinators of one shard, for any protocol."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import ray
from ray.actor import ActorHandle

from privmix.budget.actor import NAME
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.coordinator.coordinator import Coordinator, CoordinatorSettings
from privmix.coordinator.messages import Delta, Generation
from privmix.fleet.shard_map import PartGroup, ShardMap
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.settings import Settings
from privmix.training.manifest import Manifest
from tests.services.coordinator.actors import NAMESPACE, open_budget

PARTS = 2
TOKENS = 3

PROMPT = (504, 253, 260)


def models_of(manifest: Manifest, settings: Settings) -> dict[int, str]:
    if settings.mechanism.halves:
        return dict(enumerate(half.name for part in manifest.parts for half in part.halves or ()))
    return {part.index: part.name for part in manifest.parts[: 1 if settings.one_model else PARTS]}


@asynccontextmanager
async def coordinating(
    settings: Settings, ledger: Path, manifest: Manifest, shard: str = "shard"
) -> AsyncIterator[tuple[Coordinator, ActorHandle]]:
    models = models_of(manifest, settings)
    protocol = settings.plan(len(models) // (2 if settings.mechanism.halves else 1))
    keeper = open_budget(ledger, PrivacyBudget.of(manifest.ensemble, settings, protocol))
    chosen = CoordinatorSettings(
        Path(manifest.base_model), NAMESPACE, NAME, when_exhausted=settings.when_exhausted, lease_tokens=4
    )
    coordinator = Coordinator(chosen, ShardMap(1, protocol, (PartGroup(0, models, (shard,)),)))
    try:
        yield coordinator, keeper
    finally:
        await coordinator.close()
        ray.get(keeper.give_up.remote())


async def generate(coordinator: Coordinator, ids: Sequence[str], tokens: int = TOKENS) -> list[Delta]:
    """Returns all deltas of one generation per id."""
    options = SamplingOptions(top_k=200)
    await coordinator.submit("line", [Generation(id_, PROMPT, options, tokens) for id_ in ids])
    deltas: list[Delta] = []
    async for batch in coordinator.events("line"):
        deltas += batch
        if sum(delta.finish_reason is not None for delta in deltas) == len(ids):
            return deltas
    raise AssertionError("the line ended before the generations")
