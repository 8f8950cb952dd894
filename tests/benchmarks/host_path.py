"""Measures a step outside the engines: `python -m tests.benchmarks.host_path --json`.

A real coordinator, budget actor and shards, whose engines wait `DEVICE_MS` as for a device, and take no processor. What
is left of a step is Ray's calls, pickling, adding, charging, sampling, text and metrics. For each cell, after all
prompts are read:

- `step_ms`: the time from step to step; `gap_ms`: the part of it in which the first shard has nothing to compute;
- `coordinator_ms`, `shards_ms`: processor time of the coordinator, and of all shards together, for a step;
- `bytes`: what reaches the coordinator for a token (`row_bytes`).

A cell is `SHARDS,VOCABULARY,CONTEXT,STREAMS`. Processor times tell most on a busy machine. To compare two commits, run
this file with the other one's tree in PYTHONPATH, one run after the other.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import ray
import torch
import typer
from ray.actor import ActorHandle

from privmix.budget import actor as budget
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.coordinator.coordinator import CoordinatorActor, CoordinatorSettings
from privmix.coordinator.messages import Generation
from privmix.engine.engine import Engine, EngineSettings
from privmix.fleet.shard_map import PartGroup, ShardMap
from privmix.foundation.errors import CoordinatorUnavailable
from privmix.foundation.ray_session import connected
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocols import PROTOCOLS
from privmix.shards.shard import CONCURRENCY, Shard
from privmix_cluster.options import JsonOption
from tests.benchmarks import options
from tests.benchmarks.load import PRIVACY, LoadPrompts, LoadRequest
from tests.benchmarks.options import show
from tests.tiny import write_served_model

NAMESPACE = "benchmark"
PARTS = 8
NAMES = tuple(f"part-{part:03d}" for part in range(PARTS))
CONTEXTS = ((1, 512, 64, 1), (1, 512, 64, 64), (1, 512, 960, 64))
SHARDS = ((2, 49_152, 64, 64), (8, 49_152, 64, 64), (2, 128_256, 64, 64), (8, 128_256, 64, 64))
DEVICE_MS = 10
ONE_THREAD = {"env_vars": {"OMP_NUM_THREADS": "1"}}


class FreeEngine(Engine):
    """Returns rows that are prepared, after a wait."""

    context_length = 4096
    adapters = NAMES

    def __init__(self, vocabulary: int, streams: int) -> None:
        self.vocabulary = vocabulary
        self._rows = torch.randn(2 * streams, vocabulary)

    def logits(self, requests: Sequence[Any]) -> torch.Tensor:
        time.sleep(1e-3 * DEVICE_MS)
        return self._rows[: sum(len(request.adapters) for request in requests)]

    def drop_caches(self, sequence: str) -> None: ...

    def close(self) -> None: ...

    _logits = logits


class FreeShard(Shard):
    def __init__(self, vocabulary: int, streams: int) -> None:
        with patch("privmix.shards.shard.create", lambda _: FreeEngine(vocabulary, streams)):
            super().__init__(EngineSettings(Path()))
        self._calls: list[tuple[float, float]] = []

    def processor_s(self) -> float:
        return sum(psutil.Process().cpu_times()[:2])

    def idle_s(self, seconds: float) -> float:
        """Returns in how much of the last seconds before the end of its last call it had no call."""
        first = self._calls[-1][1] - seconds
        return seconds - sum(end - max(begin, first) for begin, end in self._calls if end > first)

    @contextmanager
    def _working(self) -> Iterator[None]:
        began = time.perf_counter()
        with super()._working():
            yield
        self._calls.append((began, time.perf_counter()))


@contextmanager
def serving(model: Path, folder: Path, shards: int, vocabulary: int, streams: int) -> Iterator[list[ActorHandle]]:
    """Starts the actors, and yields the coordinator and the shards."""
    size = PARTS // shards
    groups = [
        PartGroup(at, {part: NAMES[part] for part in range(at * size, (at + 1) * size)}, (f"shard-{at}",))
        for at in range(shards)
    ]
    actor = ray.remote(max_restarts=-1, max_task_retries=0, concurrency_groups=CONCURRENCY)(FreeShard)
    settings = PROTOCOLS["pmixed"].model_validate({"protocol": "pmixed", **PRIVACY})
    planned = settings.plan(PARTS)
    started = [
        actor.options(name=group.shards[0], namespace=NAMESPACE, num_cpus=0, runtime_env=ONE_THREAD).remote(
            vocabulary, streams
        )
        for group in groups
    ]
    ledger = budget.start(f"{folder}/ledger.db", PrivacyBudget.of("host", settings, planned), namespace=NAMESPACE)
    coordinator = CoordinatorActor.options(name="coordinator", namespace=NAMESPACE, num_cpus=0, runtime_env=ONE_THREAD)
    limits = CoordinatorSettings(model, NAMESPACE, budget.NAME, max_live=128, lease_tokens=4096, threads=1)
    actors = [coordinator.remote(limits, ShardMap(1, planned, tuple(groups))), *started]
    try:
        ray.get([shard.status.remote() for shard in started])
        while not healthy(actors[0]):
            time.sleep(1)
        yield actors
    finally:
        ray.get(actors[0].close.remote())  # a call to an actor that is killed would be told on standard output
        for each in (*actors, ledger):
            ray.kill(each)
        time.sleep(1)  # until their names are free


def healthy(coordinator: ActorHandle) -> bool:
    """Tells whether the coordinator reaches its shards, whose first answer takes seconds on a busy machine."""
    try:
        ray.get(coordinator.health.remote())
    except CoordinatorUnavailable:
        return False
    return True


def decode(coordinator: ActorHandle, questions: Sequence[LoadRequest]) -> dict[str, float]:
    """Measures steps of concurrent generations after all prefills: seconds, tokens, and `Coordinator.measures`."""
    channel = f"channel-{time.monotonic_ns()}"
    events = coordinator.events.remote(channel)
    waiting = {f"{channel}-{number}": question for number, question in enumerate(questions)}
    generations = [
        Generation(id_, question.prompt, SamplingOptions(), question.tokens, ignore_eos=True)
        for id_, question in waiting.items()
    ]
    ray.get(coordinator.submit.remote(channel, generations))
    open_ = set(waiting)
    began, tokens = 0.0, 0
    for batch in events:
        deltas = ray.get(batch)
        if waiting:
            for delta in deltas:
                waiting.pop(delta.id, None)
            ray.get(coordinator.measures.remote())
            began = time.perf_counter()
        else:
            tokens += sum(delta.tokens for delta in deltas)
        open_ -= {delta.id for delta in deltas if delta.finish_reason}
        if not open_:
            break
    seconds = time.perf_counter() - began
    measures: dict[str, Any] = ray.get(coordinator.measures.remote())
    return {**measures, "seconds": seconds, "tokens": tokens}


def cell(coordinator: ActorHandle, shards: Sequence[ActorHandle], prompts: LoadPrompts, shape: tuple[int, ...]) -> Any:
    *_, context, streams = shape
    decode(coordinator, prompts.questions(2, 16, 4))  # what is made once, is made here
    process = next(  # the newest one, if others of this machine measure too
        each
        for each in sorted(psutil.process_iter(["create_time", "cmdline"]), key=lambda each: -each.info["create_time"])
        if " ".join(each.info["cmdline"] or ()).startswith("ray::Coordinator")  # a process that has ended has none
    )

    def spent() -> list[float]:
        return [sum(process.cpu_times()[:2]), sum(ray.get([shard.processor_s.remote() for shard in shards]))]

    before, tokens = spent(), 60 if shape[1] < 10_000 else 12
    measured = decode(coordinator, prompts.questions(streams, context, tokens))
    ours, theirs = (1e3 * (after - first) / tokens for after, first in zip(spent(), before, strict=True))
    idle: float = ray.get(shards[0].idle_s.remote(measured["seconds"]))
    return {
        "step_ms": round(1e3 * measured["seconds"] / measured["steps"], 2),
        "gap_ms": round(1e3 * idle / measured["steps"], 2),
        "coordinator_ms": round(ours, 2),
        "shards_ms": round(theirs, 2),
        "bytes": round(measured["row_bytes"] / measured["tokens"]),
    }


def main(quick: options.QuickCellOption = False, as_json: JsonOption = False) -> None:
    """Measures and prints the values of this module's description."""
    result = {}
    with tempfile.TemporaryDirectory() as name, connected():
        folder, prompts = Path(name), LoadPrompts()
        model = write_served_model(folder / "model", 1024)
        for shape in ((1, 512, 64, 2), (2, 512, 64, 2)) if quick else (*CONTEXTS, *SHARDS):
            shards, vocabulary, _, streams = shape
            place = folder / ",".join(map(str, shape))
            place.mkdir()
            with serving(model, place, shards, vocabulary, streams) as (coordinator, *started):
                result[place.name] = cell(coordinator, started, prompts, shape)
                print(f"{place.name}: {result[place.name]}", file=sys.stderr)
    show(result, as_json)


if __name__ == "__main__":
    typer.run(main)
