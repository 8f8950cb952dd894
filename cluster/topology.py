"""Which shard serves which parts, and with what."""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from cluster.configuration import ConfigurationError, EnsembleConfiguration
from services.engine.engine import EngineSettings
from services.fleet.plan import ShardPlan
from services.training.manifest import Adapter, Manifest


def plan_shards(
    configuration: EnsembleConfiguration, manifest: Manifest, model: Path, gpus: float, halves: bool = False
) -> list[ShardPlan]:
    """Consecutive blocks of `shards.parts_per_shard` parts, one shard each, of which the first `shards.count` serve.

    Args:
        model: the base model's directory.
        gpus: how many GPUs the cluster has.
        halves: serve, in place of each part i's own model, those of its halves, as the models 2 i and 2 i + 1.

    Raises:
        ConfigurationError: `halves`, and the ensemble was trained without; or several models attend to their own keys.
    """
    if manifest.attention == "own" and (len(manifest.parts) > 1 or halves):
        raise ConfigurationError(
            f"ensemble: the adapters of {configuration.ensemble} attend to their own keys and values, which is "
            "served for one model alone; train the parts again with `privmix train`, as readers"
        )
    shards, each = configuration.shards, 2 if halves else 1
    models = _halves(configuration, manifest) if halves else manifest.parts
    num_gpus = shards.num_gpus if shards.num_gpus is not None else float(gpus > 0)
    return [
        ShardPlan(
            index=index,
            parts=len(served) // each,
            models={number: adapter.name for number, adapter in served.items()},
            engine=_engine_settings(configuration, manifest, model, served.values(), num_gpus),
            num_cpus=shards.num_cpus,
            num_gpus=num_gpus,
            environment=_environment(configuration, num_gpus),
            copies=shards.copies,
        )
        for index, served in enumerate(_blocks(models, shards.parts_per_shard * each))
    ]


def shards_served(configuration: EnsembleConfiguration, manifest: Manifest) -> int:
    """How many blocks serve from the start.

    Raises:
        ConfigurationError: `shards.count` is more than there are.
    """
    blocks = math.ceil(len(manifest.parts) / configuration.shards.parts_per_shard)
    match configuration.shards.count:
        case None:
            wanted = blocks
        case "auto":
            wanted = 1
        case count:
            wanted = count
    if wanted > blocks:
        raise ConfigurationError(
            f"shards.count: {len(manifest.parts)} parts in blocks of {configuration.shards.parts_per_shard} are "
            f"{blocks} shards at most, not {wanted}; more of the same parts are `shards.copies`"
        )
    return wanted


def parts_served(configuration: EnsembleConfiguration, manifest: Manifest) -> int:
    """N from the start: the parts of the blocks that serve."""
    return min(len(manifest.parts), shards_served(configuration, manifest) * configuration.shards.parts_per_shard)


def _halves(configuration: EnsembleConfiguration, manifest: Manifest) -> tuple[Adapter, ...]:
    if any(part.halves is None for part in manifest.parts):
        raise ConfigurationError(
            f"ensemble: {configuration.ensemble} has no adapters for the halves of its parts; "
            "add them with `privmix train --halves`"
        )
    return tuple(half for part in manifest.parts for half in part.halves or ())


def _blocks(models: Sequence[Adapter], size: int) -> list[dict[int, Adapter]]:
    numbered = list(enumerate(models))
    return [dict(numbered[start : start + size]) for start in range(0, len(numbered), size)]


def _engine_settings(
    configuration: EnsembleConfiguration, manifest: Manifest, model: Path, adapters: Iterable[Adapter], num_gpus: float
) -> EngineSettings:
    """Engines that reserve a fraction of a GPU share it: each takes its fraction of the memory for engines."""
    engine = configuration.engine
    share = num_gpus if 0 < num_gpus < 1 else 1.0
    return EngineSettings(
        model=model,
        kind=engine.kind,
        dtype=engine.dtype,
        context_length=engine.context_length,
        cache_gib=engine.cache_gib,
        gpu_memory_utilization=engine.gpu_memory_utilization * share,
        attention=manifest.attention,
        adapters={one.name: manifest.adapter_path(configuration.ensemble, one) for one in adapters},
    )


def _environment(configuration: EnsembleConfiguration, num_gpus: float) -> dict[str, str]:
    """Of a shard's process.

    Ray gives an actor one thread for each CPU it reserves; an engine on the CPU uses them all. On a GPU the products of
    vLLM's ordinary kernels add up in an order that depends on the batch, those of LoRA adapters in one that changes
    from run to run; its batch-invariant kernels give each row the same bits in every batch. vLLM reads the variable
    when it is imported.
    """
    threads = configuration.shards.threads or (None if num_gpus else os.cpu_count())
    environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    if num_gpus:
        environment["VLLM_BATCH_INVARIANT"] = str(int(configuration.engine.batch_invariant))
    return environment
