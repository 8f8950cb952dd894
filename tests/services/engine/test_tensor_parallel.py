"""Claim: an engine over two ranks answers like an engine over one, and its processes end together.

The ranks are processes on the CPU, with gloo or shared memory in place of NCCL.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch

pytest.importorskip("vllm")

from privmix.engine import PartKind
from privmix.engine.adapter_config import LORA_RANKS, slot_bytes
from privmix.engine.engine import PUBLIC, ZERO, EngineSettings, Request, create
from privmix.engine.part_text import text_files
from privmix.engine.tensor_parallel import RankLostError
from privmix.foundation.files import write_files
from privmix.privacy.protocols.pmixed import PMixed
from privmix.shards.shard import ShardActor
from privmix.training.options import PLAIN_TARGETS
from tests.ensembles import write_adapters
from tests.services.engine import ranks
from tests.services.engine.vllm_starts import recorded_slots, start_with
from tests.support.asking import asked
from tests.support.random_models import random_model
from tests.support.ray_cluster import ray_cluster

ROOT = Path(__file__).parents[3]
NAMES = ("first", "second", "third")
SIZES: dict[str, Any] = {
    "vocab_size": 130,  # vLLM pads the vocabulary so that the ranks have equal slices
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "llama": ("llama", {}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "with biases": ("qwen2", {}),
    "experts": ("qwen3_moe", EXPERTS),
}
TOKENS = tuple(torch.randint(0, 130, (300,), generator=torch.Generator().manual_seed(0)).tolist())
LATE = 2
ROUNDING = 2e-4
"""The maximum difference of log-probabilities in float32, whose sums over ranks have another order."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the two ranks are processes on the CPU"),
]


def write_model(folder: Path, name: str) -> Path:
    torch.manual_seed(0)
    kind, described = MODELS[name]
    model = random_model(kind, **SIZES | described)
    for key, weights in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(weights, std=0.2)
    model.save_pretrained(folder)
    return folder


def write_parts(folder: Path, model: Path, kind: str) -> dict[str, Path]:
    match kind:
        case "lora":
            return write_adapters(folder, NAMES, model, targets=PLAIN_TARGETS)
        case "text":
            for number, name in enumerate(NAMES):
                text = np.array(TOKENS[40 * number :][:40], np.int32)
                write_files(folder / name, text_files(text, 128))
            return {name: folder / name for name in NAMES}
    return write_adapters(folder, NAMES, model, layers=LATE if kind == "late" else None)


def rows_of(settings: EngineSettings) -> torch.Tensor:
    """Returns rows of two sequences that share a prefix, in steps of one token and of many."""
    engine = create(settings)
    first, *others = settings.adapters
    rows = [
        engine.next_token(
            [
                Request("one", TOKENS[:length], (PUBLIC, first, ZERO, *others)),
                Request("other", TOKENS[: length - 1], (*others, first)),
            ]
        )
        for length in (5, 6, 7, 60, 61, 200)
    ]
    engine.drop_caches("one")
    rows.append(engine.next_token([Request("again", TOKENS[:150], (first, PUBLIC))]))
    engine.close()
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("model", "kind", "apart"),
    [
        ("llama", "late", False),
        ("llama", "late", True),
        ("llama", "lora", False),
        ("llama", "text", False),
        ("one key head", "reader", False),
        ("with biases", "reader", False),
        ("experts", "text", True),
    ],
)
def test_two_ranks_answer_like_one(
    model: str, kind: str, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "model", model)
    part_kind: PartKind = "lora" if kind == "lora" else "text" if kind == "text" else "reader"
    settings = EngineSettings(path, "vllm", "float32", 256, cache_gib=1, part_kind=part_kind)
    settings = replace(settings, adapters=write_parts(tmp_path / "parts", path, kind))
    if apart:
        start_with(monkeypatch, worker_cls=ranks.named(ranks.ApartWorker))
    one, two = rows_of(settings), rows_of(replace(settings, tensor_parallel_size=2))
    assert (one - two).abs().max() <= ROUNDING
    assert (one[1] - one[0]).abs().max() > 1000 * ROUNDING


def test_adapters_that_share_slots_are_loaded_by_both_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU all adapters have slots; on a GPU, loads would take turns like this."""
    path = write_model(tmp_path / "model", "llama")
    adapters = write_adapters(tmp_path / "parts", NAMES, path)
    settings = EngineSettings(path, "vllm", "float32", 256, cache_gib=1, adapters=adapters)
    one = rows_of(settings)
    start_with(monkeypatch, max_loras=2)
    allocated = recorded_slots(monkeypatch)
    two = rows_of(replace(settings, tensor_parallel_size=2))
    assert (one - two).abs().max() <= ROUNDING
    slot = slot_bytes(adapters["first"], LORA_RANKS[0], 4, key_width=32, devices=2)
    assert allocated == [2 * slot]


@contextmanager
def running(tmp_path: Path, worker: str = "CPUReaderWorker") -> Iterator[tuple[Any, psutil.Process]]:
    """Runs `ranks` and yields it with the process of its second rank."""
    model = write_model(tmp_path / "model", "llama")
    command = [sys.executable, "-m", ranks.__name__, str(model), worker]
    environment = {**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        try:
            follower = psutil.Process(int(process.stdout.readline()))  # type: ignore[union-attr]
            with removing_shared_memory(psutil.Process(process.pid)):
                yield process, follower
        finally:
            process.kill()


@contextmanager
def removing_shared_memory(process: psutil.Process) -> Iterator[None]:
    """Removes what vLLM leaves in shared memory when all its processes are killed."""
    segments = [Path(mapped.path) for mapped in process.memory_maps() if mapped.path.startswith("/dev/shm/")]
    yield
    for segment in segments:
        if segment.name.startswith(("vllm_dist_", "psm_", "sem.")):
            segment.unlink(missing_ok=True)


def ask(process: Any, context: str) -> str:
    process.stdin.write(context + "\n")
    return str(process.stdout.readline())


def wait_for_end(process: psutil.Process) -> None:
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.1)


def test_closing_the_engine_ends_its_processes(tmp_path: Path) -> None:
    with running(tmp_path) as (process, follower):
        assert ask(process, "1 2 3") == "answered\n"
        process.stdin.close()
        assert process.stdout.readline() == "closed\n"
        assert not follower.is_running()
        assert process.wait() == 0


def test_a_call_does_not_wait_for_a_killed_rank(tmp_path: Path) -> None:
    with running(tmp_path, "WaitingWorker") as (process, follower):
        assert ask(process, "1 2 3") == "waits\n"
        follower.kill()
        assert process.wait() == 1


@pytest.mark.parametrize(("worker", "answer"), [("CPUReaderWorker", "answered\n"), ("WaitingFollower", "waits\n")])
def test_the_other_rank_ends_with_rank_0(tmp_path: Path, worker: str, answer: str) -> None:
    """Also if it waits for rank 0 in a collective operation."""
    with running(tmp_path, worker) as (process, follower):
        assert ask(process, "1 2 3") == answer
        process.kill()
        wait_for_end(follower)


def test_a_shard_over_two_ranks_reports_a_lost_rank(tmp_path: Path) -> None:
    """With this status, the fleet replaces the actor."""
    model = write_model(tmp_path / "model", "llama")
    settings = EngineSettings(model, "vllm", "float32", 64, cache_gib=1, tensor_parallel_size=2)
    rows = asked(PMixed(1, 0.5, 0.4), {0: "part-000"}, {"sequence": TOKENS[:5]}, [()])
    with ray_cluster(2):
        shard = ShardActor.remote(settings)
        assert ray.get(shard.next_token.remote(rows, public=True)).shape == (1, SIZES["vocab_size"])
        status = ray.get(shard.status.remote())
        assert status.trouble(60.0) is None
        process = psutil.Process(status.process)
        (follower,) = (child for child in process.children() if "spawn_main" in " ".join(child.cmdline()))
        with removing_shared_memory(process):
            follower.kill()
            with pytest.raises(RankLostError):
                ray.get(shard.next_token.remote(rows, public=True))
            assert ray.get(shard.status.remote()).trouble(60.0) == "its engine failed with RankLostError"
