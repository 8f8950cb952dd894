"""Claim: the topology assigns models to shards, and shards to GPUs."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from privmix.fleet.plan import numbers_of
from privmix.foundation.errors import ConfigurationError
from privmix.training.manifest import Manifest, Part
from privmix_cluster.configuration import Configuration
from privmix_cluster.topology import parts_served, plan_shards, shards_served
from tests.support.manifests import adapter, manifest

MODEL = Path("/models/base")


def part(index: int, halves: bool) -> Part:
    name = f"part-{index:03d}"
    pair = (adapter(f"{name}a"), adapter(f"{name}b")) if halves else None
    return Part(index=index, halves=pair, **dict(adapter(name)))


def ensemble(parts: int, halves: bool) -> Manifest:
    return manifest(*(part(index, halves) for index in range(parts)))


@pytest.fixture
def configuration(tmp_path: Path) -> Configuration:
    return Configuration.of({"ensemble": "ensemble", "shards": {"parts_per_shard": 2}}, tmp_path)


@pytest.mark.parametrize("trained_halves", [False, True])
def test_parts_are_spread_in_blocks(configuration: Configuration, trained_halves: bool) -> None:
    plans = plan_shards(configuration, ensemble(3, trained_halves), MODEL, gpus=0)
    assert [plan.shards(1) for plan in plans] == [("shard-000",), ("shard-001",)]
    assert [plan.models for plan in plans] == [{0: "part-000", 1: "part-001"}, {2: "part-002"}]
    assert [plan.parts for plan in plans] == [2, 1]
    assert plans[1].engine.adapters == {"part-002": configuration.ensemble / "parts" / "part-002"}


def test_halves_of_a_part_are_served_together_in_its_place(configuration: Configuration) -> None:
    plans = plan_shards(configuration, ensemble(3, halves=True), MODEL, gpus=0, halves=True)
    assert [plan.models for plan in plans] == [
        {0: "part-000a", 1: "part-000b", 2: "part-001a", 3: "part-001b"},
        {4: "part-002a", 5: "part-002b"},
    ]
    assert plans[1].engine.adapters == {
        name: configuration.ensemble / "parts" / name for name in ("part-002a", "part-002b")
    }
    with pytest.raises(ConfigurationError, match="privmix train --halves"):
        plan_shards(configuration, ensemble(3, halves=False), MODEL, gpus=0, halves=True)


@pytest.mark.parametrize(("gpus", "reserved"), [(0.0, 0.0), (4.0, 1.0)])
def test_a_shard_reserves_a_gpu_where_there_are_any(configuration: Configuration, gpus: float, reserved: float) -> None:
    plans = plan_shards(configuration, ensemble(3, halves=True), MODEL, gpus)
    assert [plan.num_gpus for plan in plans] == [reserved, reserved]
    hidden = {plan.environment.get("CUDA_VISIBLE_DEVICES") for plan in plans}
    assert hidden == ({None} if reserved else {""}), "Ray hides no GPU from a shard that reserves none"


@pytest.mark.parametrize(("reserved", "share"), [(0.0, 0.9), (0.5, 0.45), (1.0, 0.9)])
def test_engines_on_one_gpu_divide_its_memory(tmp_path: Path, reserved: float, share: float) -> None:
    configuration = Configuration.of({"ensemble": "e", "shards": {"num_gpus": reserved}}, tmp_path)
    (plan,) = plan_shards(configuration, ensemble(3, halves=False), MODEL, gpus=2)
    assert plan.engine.gpu_memory_utilization == pytest.approx(share)


def write_config(folder: Path, **sizes: Any) -> Path:
    usual: dict[str, Any] = {
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "hidden_size": 96,
        "intermediate_size": 240,
    }
    LlamaConfig(**usual | sizes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("key_heads", "gpus"), [(4, 2), (4, 4), (1, 4), (2, 4)])
def test_a_shard_with_several_gpus_splits_the_model_over_them(tmp_path: Path, key_heads: int, gpus: int) -> None:
    """vLLM repeats key heads where there are fewer than GPUs. Each GPU gives all of its share of memory."""
    configuration = Configuration.of({"ensemble": "e", "shards": {"num_gpus": gpus}}, tmp_path)
    model = write_config(tmp_path / "model", num_key_value_heads=key_heads)
    (plan,) = plan_shards(configuration, ensemble(3, halves=False), model, gpus=8)
    assert (plan.num_gpus, plan.engine.tensor_parallel_size) == (gpus, gpus)
    assert plan.engine.gpu_memory_utilization == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("gpus", "sizes", "message"),
    [
        (1.5, {}, "must be a whole number above 1, .* not 1.5"),
        (8, {}, "8 GPUs do not divide the model's 12 attention heads evenly"),
        (3, {}, "3 GPUs do not divide the model's 4 key heads evenly"),
        (4, {"intermediate_size": 242}, "4 GPUs do not divide the model's 242 MLP units evenly"),
        (2, {"kind": "transformers"}, "must be at most 1 with engine.kind transformers"),
        (5, {}, "5 GPUs do not divide the model's 12 attention heads, 4 key heads evenly; set a number that does"),
    ],
)
def test_gpus_that_cannot_divide_the_model_are_refused(
    tmp_path: Path, gpus: float, sizes: dict[str, Any], message: str
) -> None:
    engine = {"kind": sizes.get("kind", "vllm")}
    configuration = Configuration.of({"ensemble": "e", "engine": engine, "shards": {"num_gpus": gpus}}, tmp_path)
    with pytest.raises(ConfigurationError, match=rf"shards\.num_gpus: {message}"):
        plan_shards(configuration, ensemble(3, halves=False), write_config(tmp_path / "model", **sizes), gpus=8)


def test_caches_of_plain_lora_parts_fit_on_a_cpu(tmp_path: Path) -> None:
    """A cache of 2,048 tokens has 32 MiB: keys and values of 2 layers, 4 heads and 256 numbers in float32."""
    model = write_config(tmp_path / "model", num_hidden_layers=2, head_dim=256)
    plain = ensemble(40, halves=False).model_copy(update={"part_kind": "lora"})

    def plan(parts: int, kind: str = "vllm", gpus: float = 0) -> None:
        engine = {"kind": kind, "dtype": "float32", "context_length": 2048, "cache_gib": 1}
        values = {"ensemble": "e", "engine": engine, "shards": {"parts_per_shard": parts}}
        plan_shards(Configuration.of(values, tmp_path), plain, model, gpus)

    plan(31)
    plan(40, gpus=1)
    plan(40, kind="transformers")
    with pytest.raises(ConfigurationError, match=r"engine\.cache_gib: 32 plain LoRA parts need 1\.0 GiB"):
        plan(32)


def test_copies_have_names_of_their_own_and_the_same_parts(tmp_path: Path) -> None:
    shards = {"parts_per_shard": 2, "count": 1}
    configuration = Configuration.of({"ensemble": "ensemble", "shards": shards}, tmp_path)
    plans = plan_shards(configuration, ensemble(3, halves=False), MODEL, gpus=0)
    names = [plan.shards(2) for plan in plans]
    assert names == [("shard-000", "shard-000-copy-1"), ("shard-001", "shard-001-copy-1")]
    assert [[numbers_of(name) for name in group] for group in names] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert (shards_served(configuration, ensemble(3, False)), parts_served(configuration, ensemble(3, False))) == (1, 2)


def test_more_shards_than_blocks_of_parts_are_refused(tmp_path: Path) -> None:
    configuration = Configuration.of({"ensemble": "e", "shards": {"parts_per_shard": 2, "count": 3}}, tmp_path)
    with pytest.raises(ConfigurationError, match="must be at most 2, not"):
        shards_served(configuration, ensemble(3, halves=False))
