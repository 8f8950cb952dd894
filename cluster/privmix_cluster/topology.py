"""Assigns the parts of an ensemble to shards and plans each shard's engine and resources."""

import math
from collections.abc import Collection, Sequence
from pathlib import Path

from privmix.engine.adapter_config import width_of_keys
from privmix.engine.engine import EngineSettings, cpu_cache_gib
from privmix.fleet.plan import ShardPlan
from privmix.foundation.cpus import available_cpus
from privmix.foundation.errors import ConfigurationError
from privmix.training.manifest import Adapter, Manifest
from privmix_cluster.configuration import Configuration


def plan_shards(
    configuration: Configuration,
    manifest: Manifest,
    model: Path,
    gpus: float,
    halves: bool = False,
    rows: int | None = None,
) -> list[ShardPlan]:
    """Plans a shard for each group of `shards.parts_per_shard` consecutive parts. The first `shards.count` serve.

    Args:
        model: the base model's directory.
        gpus: the number of GPUs in the cluster.
        halves: serve the models of each part's halves instead of its own model. Part i has the models 2i and 2i + 1.
        rows: the number of part rows of a token (`Protocol.rows`), for which engines on GPUs capture their steps.

    Raises:
        ConfigurationError: `halves` is set and the ensemble has no models of half-parts, or the engine cannot split
            the model over `shards.num_gpus`, or has no room for the caches of a sequence.
    """
    shards, models_per_part = configuration.shards, 2 if halves else 1
    models = _halves(configuration, manifest) if halves else manifest.parts
    num_gpus = shards.num_gpus if shards.num_gpus is not None else float(gpus > 0)
    if num_gpus > 1:
        _check_split(configuration, model, num_gpus)
    if not num_gpus and manifest.part_kind == "lora" and configuration.engine.kind == "vllm":
        _check_caches(configuration, model, min(shards.parts_per_shard, len(manifest.parts)))
    return [
        ShardPlan(
            index=index,
            parts=len(adapters) // models_per_part,
            models={number: adapter.name for number, adapter in adapters.items()},
            engine=_engine_settings(configuration, manifest, model, adapters.values(), num_gpus, rows or 0),
            num_cpus=shards.num_cpus,
            num_gpus=num_gpus,
            environment=_environment(configuration, num_gpus),
        )
        for index, adapters in enumerate(_groups(models, shards.parts_per_shard * models_per_part))
    ]


def shards_served(configuration: Configuration, manifest: Manifest) -> int:
    """Returns the number of shards that serve from the start.

    Raises:
        ConfigurationError: `shards.count` is larger than the number of shards.
    """
    shards = math.ceil(len(manifest.parts) / configuration.shards.parts_per_shard)
    serving = configuration.shards.count or shards
    if serving > shards:
        raise ConfigurationError(
            f"shards.count: must be at most {shards}, not {serving}: {len(manifest.parts)} parts with "
            f"{configuration.shards.parts_per_shard} parts per shard; for more throughput, set `shards.copies`"
        )
    return serving


def parts_served(configuration: Configuration, manifest: Manifest) -> int:
    """Returns N at the start: the number of parts of the shards that serve."""
    return min(len(manifest.parts), shards_served(configuration, manifest) * configuration.shards.parts_per_shard)


def _halves(configuration: Configuration, manifest: Manifest) -> tuple[Adapter, ...]:
    if any(part.halves is None for part in manifest.parts):
        raise ConfigurationError(
            f"ensemble: {configuration.ensemble} has no adapters for the halves of its parts; "
            "add them with `privmix train --halves`"
        )
    return tuple(half for part in manifest.parts for half in part.halves or ())


def _groups(models: Sequence[Adapter], size: int) -> list[dict[int, Adapter]]:
    numbered = list(enumerate(models))
    return [dict(numbered[start : start + size]) for start in range(0, len(numbered), size)]


def _check_split(configuration: Configuration, model: Path, num_gpus: float) -> None:
    """Raises ConfigurationError if the engine cannot split the model over this number of GPUs."""
    if configuration.engine.kind != "vllm":
        raise ConfigurationError(
            f"shards.num_gpus: must be at most 1 with engine.kind {configuration.engine.kind}, not {num_gpus:g}: only "
            "vllm splits a model over several GPUs"
        )
    if not num_gpus.is_integer():
        raise ConfigurationError(
            f"shards.num_gpus: must be a whole number above 1, over which vLLM splits the model, not {num_gpus:g}"
        )
    if uneven := _uneven_sizes(model, int(num_gpus)):
        raise ConfigurationError(
            f"shards.num_gpus: {num_gpus:g} GPUs do not divide the model's {', '.join(uneven)} evenly; set a number "
            "that does"
        )


def _check_caches(configuration: Configuration, model: Path, parts: int) -> None:
    """Raises ConfigurationError if plain LoRA parts, which have a cache each, need more memory than a CPU has for it.

    A GPU's engine, which knows what is left of its memory, refuses that itself.
    """
    from transformers import AutoConfig

    config, engine = AutoConfig.from_pretrained(model).get_text_config(), configuration.engine
    token = 2 * config.num_hidden_layers * width_of_keys(config, 1) * (4 if engine.dtype == "float32" else 2)
    needed = (1 + parts) * engine.context_length * token / 2**30
    if needed > cpu_cache_gib(engine.cache_gib):
        raise ConfigurationError(
            f"engine.cache_gib: {parts} plain LoRA parts need {needed:.1f} GiB for a sequence of engine.context_length "
            f"{engine.context_length}; raise it, or lower shards.parts_per_shard or engine.context_length"
        )


def _uneven_sizes(model: Path, gpus: int) -> list[str]:
    """Returns the sizes of a model that vLLM must split evenly over GPUs and cannot."""
    from transformers import AutoConfig  # its import takes seconds, and only these shards need it

    config = AutoConfig.from_pretrained(model).get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    split = {
        "attention heads": heads,
        "key heads": max(key_heads, gpus) if gpus % key_heads == 0 else key_heads,  # vLLM repeats the heads of few
        "MLP units": config.intermediate_size,
        "units of an expert": getattr(config, "moe_intermediate_size", None) or 0,
    }
    return [f"{size} {name}" for name, size in split.items() if size % gpus]


def _engine_settings(
    configuration: Configuration,
    manifest: Manifest,
    model: Path,
    adapters: Collection[Adapter],
    num_gpus: float,
    rows: int,
) -> EngineSettings:
    """Returns the engine's settings.

    An engine that reserves a fraction of a GPU gets that fraction of its memory. One that reserves several GPUs splits
    its model over them.
    """
    engine = configuration.engine
    fraction = num_gpus if 0 < num_gpus < 1 else 1.0
    return EngineSettings(
        model=model,
        kind=engine.kind,
        dtype=engine.dtype,
        context_length=engine.context_length,
        cache_gib=engine.cache_gib,
        gpu_memory_utilization=engine.gpu_memory_utilization * fraction,
        part_kind=manifest.part_kind,
        rows=min(rows, len(adapters)),
        tensor_parallel_size=max(1, int(num_gpus)),
        adapters={adapter.name: configuration.ensemble / adapter.path for adapter in adapters},
    )


def _environment(configuration: Configuration, num_gpus: float) -> dict[str, str]:
    """Returns the environment variables of a shard's process.

    Ray limits an actor to one thread for each reserved CPU, but an engine on the CPU should use all cores. An operator
    who wants vLLM's kernels that give a row the same bits in every batch sets VLLM_BATCH_INVARIANT on the nodes.
    """
    threads = configuration.shards.threads
    if not num_gpus:
        return _cpu_environment(threads or available_cpus())
    return {} if threads is None else {"OMP_NUM_THREADS": str(threads)}


def _cpu_environment(threads: int) -> dict[str, str]:
    """Returns the environment variables of a process that computes rows on a CPU.

    A step's rows take many megabytes. PyTorch puts large tensors on huge pages, where Linux grants them (`madvise`);
    they are mapped page by page otherwise. glibc keeps freed memory for the next step: it would return such tensors
    to Linux, and where free memory is fragmented, mapping them again can take as long as the step. It keeps them in
    its main arena alone.

    Between two operations, GNU OpenMP's threads wait in a loop of 300,000 rounds before they sleep, so that they take
    the processors that gateways need, and all of them wait for a thread that lost its processor. They sleep after as
    many rounds as it gives them where there are more threads than processors
    (https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html), because there are: those of all processes.

    Ray 2.60 leaves all GPUs visible to an actor that reserves none.
    """
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "1000",
        "THP_MEM_ALLOC_ENABLE": "1",
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
    }
