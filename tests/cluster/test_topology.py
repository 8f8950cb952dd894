"""Claim: the topology assigns models to shards, and shards to GPUs."""

from pathlib import Path
from typing import Literal

import pytest

from cluster.configuration import Configuration, EnsembleConfiguration
from cluster.topology import parts_served, plan_shards, shards_served
from services.errors import ConfigurationError
from services.training.manifest import Adapter, Manifest, Part

DIGEST = "0" * 64
MODEL = Path("/models/base")


def adapter(name: str) -> Adapter:
    return Adapter(name=name, path=f"parts/{name}", sha256=DIGEST, size_bucket=1)


def part(index: int, halves: bool) -> Part:
    name = f"part-{index:03d}"
    pair = (adapter(f"{name}a"), adapter(f"{name}b")) if halves else None
    return Part(index=index, halves=pair, **dict(adapter(name)))


def manifest(parts: int, halves: bool, part_kind: Literal["reader", "lora"] = "reader") -> Manifest:
    return Manifest(
        ensemble="e",
        base_model="m",
        base_revision=DIGEST,
        tokenizer=DIGEST,
        salt_id="s",
        rank=4,
        part_kind=part_kind,
        parts=tuple(part(index, halves) for index in range(parts)),
    )


@pytest.fixture
def configuration(tmp_path: Path) -> EnsembleConfiguration:
    return Configuration.of({"ensemble": "ensemble", "shards": {"parts_per_shard": 2}}, tmp_path).choose()


@pytest.mark.parametrize("trained_halves", [False, True])
def test_parts_are_spread_in_blocks(configuration: EnsembleConfiguration, trained_halves: bool) -> None:
    plans = plan_shards(configuration, manifest(3, trained_halves), MODEL, gpus=0)
    assert [plan.shards for plan in plans] == [("shard-000",), ("shard-001",)]
    assert [plan.models for plan in plans] == [{0: "part-000", 1: "part-001"}, {2: "part-002"}]
    assert [plan.parts for plan in plans] == [2, 1]
    assert plans[1].engine.adapters == {"part-002": configuration.ensemble / "parts" / "part-002"}


def test_halves_of_a_part_are_served_together_in_its_place(configuration: EnsembleConfiguration) -> None:
    plans = plan_shards(configuration, manifest(3, halves=True), MODEL, gpus=0, halves=True)
    assert [plan.models for plan in plans] == [
        {0: "part-000a", 1: "part-000b", 2: "part-001a", 3: "part-001b"},
        {4: "part-002a", 5: "part-002b"},
    ]
    assert plans[1].engine.adapters == {
        name: configuration.ensemble / "parts" / name for name in ("part-002a", "part-002b")
    }


def test_halves_that_were_not_trained_are_asked_for(configuration: EnsembleConfiguration) -> None:
    with pytest.raises(ConfigurationError, match="privmix train --halves"):
        plan_shards(configuration, manifest(3, halves=False), MODEL, gpus=0, halves=True)


@pytest.mark.parametrize(("gpus", "reserved"), [(0.0, 0.0), (4.0, 1.0)])
def test_a_shard_reserves_a_gpu_where_there_are_any(
    configuration: EnsembleConfiguration, gpus: float, reserved: float
) -> None:
    plans = plan_shards(configuration, manifest(3, halves=True), MODEL, gpus)
    assert [plan.num_gpus for plan in plans] == [reserved, reserved]


@pytest.mark.parametrize(("reserved", "share"), [(0.0, 0.9), (0.5, 0.45), (1.0, 0.9)])
def test_engines_on_one_gpu_divide_its_memory(tmp_path: Path, reserved: float, share: float) -> None:
    configuration = Configuration.of({"ensemble": "e", "shards": {"num_gpus": reserved}}, tmp_path).choose()
    (plan,) = plan_shards(configuration, manifest(3, halves=False), MODEL, gpus=2)
    assert plan.engine.gpu_memory_utilization == pytest.approx(share)


def test_several_gpus_for_one_engine_are_refused(tmp_path: Path) -> None:
    configuration = Configuration.of({"ensemble": "e", "shards": {"num_gpus": 2}}, tmp_path).choose()
    with pytest.raises(ConfigurationError, match=r"shards\.num_gpus: must be at most 1, not 2: .* shards\.copies"):
        plan_shards(configuration, manifest(3, halves=False), MODEL, gpus=2)


@pytest.mark.parametrize("invariant", [True, False])
def test_kernels_on_a_gpu_are_batch_invariant_only_on_demand(tmp_path: Path, invariant: bool) -> None:
    """The constant shape of a step protects the draw; invariant kernels cost twice the time of a small batch."""
    values = {"ensemble": "e", **({"engine": {"batch_invariant": True}} if invariant else {})}
    configuration = Configuration.of(values, tmp_path).choose()
    (on_gpu,) = plan_shards(configuration, manifest(3, halves=False), MODEL, gpus=1)
    (on_cpu,) = plan_shards(configuration, manifest(3, halves=False), MODEL, gpus=0)
    assert on_gpu.environment["VLLM_BATCH_INVARIANT"] == str(int(invariant))
    assert "VLLM_BATCH_INVARIANT" not in on_cpu.environment


def test_copies_have_names_of_their_own_and_the_same_parts(tmp_path: Path) -> None:
    shards = {"parts_per_shard": 2, "copies": 2, "count": 1}
    configuration = Configuration.of({"ensemble": "ensemble", "shards": shards}, tmp_path).choose()
    plans = plan_shards(configuration, manifest(3, halves=False), MODEL, gpus=0)
    assert [plan.shards for plan in plans] == [("shard-000", "shard-000-copy-1"), ("shard-001", "shard-001-copy-1")]
    assert (shards_served(configuration, manifest(3, False)), parts_served(configuration, manifest(3, False))) == (1, 2)


def test_more_shards_than_blocks_of_parts_are_refused(tmp_path: Path) -> None:
    configuration = Configuration.of({"ensemble": "e", "shards": {"parts_per_shard": 2, "count": 3}}, tmp_path).choose()
    with pytest.raises(ConfigurationError, match="must be at most 2, not"):
        shards_served(configuration, manifest(3, halves=False))


def test_several_parts_with_attention_of_their_own_are_refused(configuration: EnsembleConfiguration) -> None:
    with pytest.raises(ConfigurationError, match=r"train the parts again with `privmix train`, as readers"):
        plan_shards(configuration, manifest(2, halves=False, part_kind="lora"), MODEL, gpus=0)
    (alone,) = plan_shards(configuration, manifest(1, halves=False, part_kind="lora"), MODEL, gpus=0)
    assert alone.engine.part_kind == "lora"
