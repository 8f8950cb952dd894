"""What a private token costs, side by side in one run on one machine: `python -m tests.benchmarks.step --json`.

- `engine_ratio`: rows per second through the coordinator over rows per second of the very same vLLM engine decoding the
  same rows (every adapter and the public model) with plain generation, all parts drawn; by concurrent sequences.
- `token_cost`: time of a private token over that of a plain token of the public model, one sequence; by q.
- `mollify_share`: the coordinator's own arithmetic as a share of its steps; by concurrent sequences.
- `mollify_speedup`: projection and aggregation for one token, against a SciPy bisection per drawn part on those rows.
- `resident_mib`: memory of each actor.

Rounds of both sides alternate and medians are compared, so that a noisy machine disturbs both alike.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import ray
import torch
import typer
from ray.actor import ActorHandle
from scipy.optimize import brentq
from transformers import AutoTokenizer
from vllm import SamplingParams

from cluster.launch import coordinator_threads
from cluster.session import connected
from services.budget import actor as budget
from services.budget.privacy_budget import PrivacyBudget
from services.coordinator.coordinator import CoordinatorActor, CoordinatorSettings
from services.coordinator.messages import Generation
from services.engine.engine import PUBLIC, EngineSettings, Request
from services.fleet.shard_map import PartGroup, ShardMap
from services.privacy.pmixed import PMixed
from services.privacy.protocol import Answers
from services.privacy.shaping import SamplingOptions, shape
from services.shard import Shard
from services.training.public_model import resolve
from tests.ensembles import write_adapters

PARTS = 8
RADIUS = 0.39
NAMESPACE = "benchmark"
PROMPT = "The caller asked the clinic whether the doctor could see her on Thursday morning, because her knee "


class MeasuredHost(Shard):
    """A shard that also decodes with its own engine in vLLM's plain way."""

    def decode(self, prompts: Sequence[Sequence[int]], adapters: Sequence[str], tokens: int) -> float:
        """Seconds per step after the prefill, every prompt under every adapter."""
        llm = self._engine._llm  # type: ignore[attr-defined]
        loras = self._engine._loras  # type: ignore[attr-defined]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for number, prompt in enumerate(prompts):
            for adapter in adapters:
                ids = {"prompt_token_ids": list(prompt)}
                llm.add_request(
                    f"{time.monotonic_ns()}-{number}-{adapter}", ids, params, lora_request=loras.get(adapter)
                )
        llm.step()
        started, steps = time.perf_counter(), 0
        while llm.has_unfinished_requests():
            llm.step()
            steps += 1
        return (time.perf_counter() - started) / steps

    def row(self, prompt: Sequence[int], adapters: Sequence[str]) -> np.ndarray:
        return self.next_token([Request("rows", tuple(prompt), tuple(adapters))])


@dataclass(frozen=True)
class Bench:
    shard: ActorHandle
    coordinators: dict[float, ActorHandle]
    prompt: tuple[int, ...]
    names: tuple[str, ...]


@contextmanager
def deployed(qs: Sequence[float]) -> Iterator[Bench]:
    model = resolve()
    names = tuple(f"part-{index:03d}" for index in range(PARTS))
    shard_threads, step_threads = (
        {"env_vars": {"OMP_NUM_THREADS": str(count)}} for count in (psutil.cpu_count(), coordinator_threads())
    )
    with tempfile.TemporaryDirectory() as folder, connected():
        adapters = write_adapters(Path(folder), names, model)
        terms = PrivacyBudget(ensemble="benchmark", epsilon=1e6, delta=1e-5, order=3, adjacency="part, add or remove")
        budget.start(f"{folder}/ledger.db", terms, namespace=NAMESPACE, lifetime="detached")
        host = ray.remote(concurrency_groups={"status": 1})(MeasuredHost)
        shard = host.options(name="shard", namespace=NAMESPACE, runtime_env=shard_threads).remote(
            EngineSettings(model=model, context_length=1024, adapters=adapters)
        )
        settings = CoordinatorSettings(model, NAMESPACE, budget.NAME)
        coordinators = {
            q: CoordinatorActor.options(num_cpus=0, runtime_env=step_threads).remote(
                settings, ShardMap(1, PMixed(PARTS, q, RADIUS), (PartGroup(0, dict(enumerate(names)), ("shard",)),))
            )
            for q in qs
        }
        prompt = tuple(AutoTokenizer.from_pretrained(model)(PROMPT).input_ids)
        yield Bench(shard, coordinators, prompt, names)


def private(bench: Bench, q: float, sequences: int, tokens: int) -> dict[str, float]:
    """Steps of `sequences` concurrent generations after their first token: seconds and rows."""
    coordinator, line = bench.coordinators[q], f"line-{time.monotonic_ns()}"
    events = coordinator.events.remote(line)
    options = SamplingOptions()
    ids = [f"{line}-{number}" for number in range(sequences)]
    ray.get(coordinator.submit.remote(line, [Generation(id_, bench.prompt, options, tokens) for id_ in ids]))
    arrived: list[float] = []
    open_ = set(ids)
    for batch in events:
        deltas = ray.get(batch)
        if not arrived:
            ray.get(coordinator.measures.remote())  # the prefill is not what is measured
        arrived.append(time.perf_counter())
        open_ -= {delta.id for delta in deltas if delta.finish_reason}
        if not open_:
            break
    measures: dict[str, Any] = ray.get(coordinator.measures.remote())
    return {**measures, "seconds": arrived[-1] - arrived[0]}


def engine_ratio(bench: Bench, sequences: int, tokens: int, rounds: int) -> tuple[float, float]:
    """The ratio, and the share of arithmetic in the coordinator's steps."""
    ratios, shares = [], []
    for _ in range(rounds):
        plain = ray.get(bench.shard.decode.remote([bench.prompt] * sequences, (PUBLIC, *bench.names), tokens))
        ours = private(bench, 1.0, sequences, tokens)
        ratios.append((ours["rows"] / ours["seconds"]) / (sequences * (PARTS + 1) / plain))
        shares.append(ours["arithmetic_s"] / (ours["arithmetic_s"] + ours["shards_s"] + ours["budget_s"]))
    return statistics.median(ratios), statistics.median(shares)


def token_cost(bench: Bench, q: float, tokens: int, rounds: int) -> float:
    costs = []
    for _ in range(rounds):
        plain = ray.get(bench.shard.decode.remote([bench.prompt], (PUBLIC,), tokens))
        ours = private(bench, q, 1, tokens)
        costs.append(ours["seconds"] / ours["steps"] / plain)
    return statistics.median(costs)


def mollify_speedup(bench: Bench, rounds: int) -> float:
    rows = torch.from_numpy(np.array(ray.get(bench.shard.row.remote(bench.prompt, (PUBLIC, *bench.names)))))
    answers = shape(rows[:1], rows[1:], (tuple(range(PARTS)),))
    protocol = PMixed(PARTS, 1.0, RADIUS)
    protocol.release(answers)
    ours, scipys = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        protocol.release(answers)
        between = time.perf_counter()
        by_scipy(answers)
        scipys.append(time.perf_counter() - between)
        ours.append(between - started)
    return statistics.median(scipys) / statistics.median(ours)


def by_scipy(answers: Answers) -> np.ndarray:
    """Each part's normaliser by a bracketing root finder of SciPy on the whole row, then the mean."""
    p0 = answers.public[0].numpy().astype(np.float64)
    low, high = np.exp(-RADIUS), np.exp(RADIUS)
    projected = []
    for row in answers.ratios.numpy().astype(np.float64):
        nu = brentq(
            lambda nu, row=row: p0 @ np.clip(row / nu, low, high) - 1,
            1e-30,
            1e30,
            xtol=1e-300,
            rtol=1e-12,
            maxiter=1000,
        )
        projected.append(p0 * np.clip(row / nu, low, high))
    return np.mean(projected, axis=0)


def resident(bench: Bench) -> dict[str, float]:
    measures = ray.get(bench.coordinators[1.0].measures.remote())
    sizes = {"shard": measures["shard_bytes"][0], "coordinator": measures["coordinator_bytes"]}
    for process in psutil.process_iter(["cmdline", "memory_info"]):
        if "ray::Budget" in " ".join(process.info["cmdline"] or ()):
            sizes["budget"] = process.info["memory_info"].rss
    return {name: round(size / 2**20, 1) for name, size in sizes.items()}


def main(
    tokens: Annotated[int, typer.Option(help="Tokens a sequence.")] = 32,
    rounds: Annotated[int, typer.Option(help="Alternating rounds of both sides; medians are compared.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the ratios of this module's description."""
    with deployed((1.0, 0.25)) as bench:
        private(bench, 1.0, 1, 4), private(bench, 0.25, 1, 4)
        ratios = {sequences: engine_ratio(bench, sequences, tokens, rounds) for sequences in (1, 8)}
        result = {
            "parts": PARTS,
            "engine_ratio": {str(sequences): round(ratio, 3) for sequences, (ratio, _) in ratios.items()},
            "mollify_share": {str(sequences): round(share, 3) for sequences, (_, share) in ratios.items()},
            "token_cost": {str(q): round(token_cost(bench, q, tokens, rounds), 2) for q in (1.0, 0.25)},
            "mollify_speedup": round(mollify_speedup(bench, rounds), 1),
            "resident_mib": resident(bench),
        }
    print(json.dumps(result) if as_json else "\n".join(f"{name}: {value}" for name, value in result.items()))


if __name__ == "__main__":
    typer.run(main)
