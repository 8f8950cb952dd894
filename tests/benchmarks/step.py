"""Measures a private token by stage, without HTTP: `python -m tests.benchmarks.step --json`.

- `private_over_plain`: tokens per second of decoding through the coordinator over tokens per second of plain vLLM with
  the same model in a process of its own; for each cell `PROTOCOL,PARTS,PROMPT TOKENS,STREAMS`, prompts ingested before.
- `stages_ms`: for each cell the time of a plain step, and of ours in the shards (including Ray's calls), in the
  coordinator's arithmetic, and in the rest.

Rounds of both sides alternate and medians are compared, so that other load affects both equally.
`tests.benchmarks.load` measures the time for a user, with prompts and HTTP.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import ray
import typer
from ray.actor import ActorHandle

from privmix.budget import actor as budget
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.coordinator.coordinator import CoordinatorActor, CoordinatorSettings
from privmix.coordinator.messages import Generation
from privmix.engine.engine import EngineSettings
from privmix.fleet.shard_map import PartGroup, ShardMap
from privmix.foundation.ray_session import connected
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.settings import Settings
from privmix.shards.shard import ShardActor
from privmix.training.public_model import resolve
from privmix_cluster.options import JsonOption
from privmix_cluster.topology import cpu_environment
from tests.benchmarks import options
from tests.benchmarks.load import DISTINCT, PRIVACY, QUICK, LoadPrompts, LoadRequest
from tests.benchmarks.options import show
from tests.ensembles import usual_layers, write_adapters

NAMESPACE = "benchmark"
CONTEXT = 1024


class PlainEngine:
    """vLLM with its defaults, in this process. It decodes greedily and continues with its own tokens."""

    def __init__(self, model: Path) -> None:
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = EngineArgs(
            model=str(model),
            dtype="bfloat16",
            max_model_len=CONTEXT,
            enforce_eager=current_platform.is_cpu(),  # as the shard's engine
            distributed_executor_backend="uni",
            disable_log_stats=True,
        )
        self._engine = LLMEngine.from_engine_args(arguments)

    def decode(self, questions: Sequence[LoadRequest]) -> float:
        """Returns the seconds of a step after the prefill of all prompts."""
        from vllm import SamplingParams

        for number, question in enumerate(questions):
            params = SamplingParams(temperature=0, max_tokens=question.tokens, ignore_eos=True, detokenize=False)
            ids = {"prompt_token_ids": list(question.prompt)}
            self._engine.add_request(f"{time.monotonic_ns()}-{number}", ids, params)
        started, steps, waiting = time.perf_counter(), 0, len(questions)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            if waiting:  # the first token marks the end of a prefill
                waiting -= sum(len(output.outputs[0].token_ids) == 1 for output in outputs)
                started, steps = time.perf_counter(), 0
            else:
                steps += 1
        return (time.perf_counter() - started) / steps


@dataclass(frozen=True)
class StepBench:
    coordinator: ActorHandle
    plain: ActorHandle


@contextmanager
def started(model: Path) -> Iterator[ActorHandle]:
    """Starts Ray and the plain engine."""
    threads = {
        "env_vars": {
            "OMP_NUM_THREADS": str(psutil.cpu_count()),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    }
    with connected():
        plain = ray.remote(PlainEngine).options(runtime_env=threads, num_cpus=0).remote(model)
        yield plain


@dataclass(frozen=True)
class Deployment:
    """One ensemble that is measured; `sample` is the number of parts that the exponential mechanism draws."""

    protocol: str
    parts: int
    shards: int
    sample: int | None

    @property
    def settings(self) -> Settings:
        sample = {"sample": self.sample} if self.protocol == "exponential" and self.sample else {}
        return PROTOCOLS[self.protocol].model_validate({"protocol": self.protocol, **PRIVACY, **sample})


@contextmanager
def deployed(plain: ActorHandle, model: Path, deployment: Deployment) -> Iterator[StepBench]:
    names = tuple(f"part-{index:03d}" for index in range(deployment.parts))
    groups = [tuple(group) for group in np.array_split(np.arange(deployment.parts), deployment.shards)]
    cores = psutil.cpu_count() or 1
    shard_threads = {"env_vars": cpu_environment(max(1, cores // deployment.shards))}
    step_threads = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    with tempfile.TemporaryDirectory() as folder:
        adapters = write_adapters(Path(folder), names, model, DISTINCT, usual_layers(model))
        held = [{int(number): names[number] for number in group} for group in groups]
        shards = tuple(
            ShardActor.options(
                name=f"shard-{index}", namespace=NAMESPACE, runtime_env=shard_threads, num_cpus=0
            ).remote(
                EngineSettings(
                    model=model, context_length=CONTEXT, adapters={name: adapters[name] for name in models.values()}
                )
            )
            for index, models in enumerate(held)
        )
        settings = deployment.settings
        planned = settings.plan(deployment.parts)
        terms = PrivacyBudget.of("benchmark", settings, planned)
        ledger = budget.start(f"{folder}/ledger.db", terms, namespace=NAMESPACE)
        coordinator = CoordinatorActor.options(num_cpus=0, runtime_env=step_threads).remote(
            CoordinatorSettings(model, NAMESPACE, budget.NAME, max_live=128, lease_tokens=256, threads=cores),
            ShardMap(
                1,
                planned,
                tuple(PartGroup(index, models, (f"shard-{index}",)) for index, models in enumerate(held)),
            ),
        )
        ray.get([shard.status.remote() for shard in shards])  # a coordinator waits only seconds for a loading shard
        ray.get(coordinator.health.remote())
        try:
            yield StepBench(coordinator, plain)
        finally:
            ray.get(coordinator.close.remote())
            for actor in (coordinator, ledger, *shards):
                ray.kill(actor)
            time.sleep(1)  # until the names of the actors are free


def private(bench: StepBench, questions: Sequence[LoadRequest]) -> dict[str, float]:
    """Measures steps of concurrent generations after all prefills: seconds by stage, and tokens."""
    channel = f"channel-{time.monotonic_ns()}"
    events = bench.coordinator.events.remote(channel)
    waiting = {f"{channel}-{number}": question for number, question in enumerate(questions)}
    generations = [
        Generation(id_, question.prompt, SamplingOptions(), question.tokens, ignore_eos=True)
        for id_, question in waiting.items()
    ]
    ray.get(bench.coordinator.submit.remote(channel, generations))
    open_ = set(waiting)
    began, tokens = 0.0, 0
    for batch in events:
        deltas = ray.get(batch)
        if waiting:
            for delta in deltas:
                waiting.pop(delta.id, None)
            ray.get(bench.coordinator.measures.remote())
            began = time.perf_counter()
        else:
            tokens += sum(delta.tokens for delta in deltas)
        open_ -= {delta.id for delta in deltas if delta.finish_reason}
        if not open_:
            break
    seconds = time.perf_counter() - began
    measures: dict[str, Any] = ray.get(bench.coordinator.measures.remote())
    return {**measures, "seconds": seconds, "tokens": tokens}


def measured(
    bench: StepBench, prompts: LoadPrompts, length: int, streams: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Measures one cell: the ratio, and the milliseconds of a step by stage."""
    ratios, stages = [], []
    for _ in range(rounds):
        plain_s = ray.get(bench.plain.decode.remote(prompts.questions(streams, length, tokens)))
        ours = private(bench, prompts.questions(streams, length, tokens))
        ratios.append(ours["tokens"] / ours["seconds"] / (streams / plain_s))
        step_s, shards_s, arithmetic_s = (
            ours[name] / ours["steps"] for name in ("seconds", "shards_s", "arithmetic_s")
        )
        stages.append((plain_s, shards_s, arithmetic_s, step_s - shards_s - arithmetic_s))
    medians = (statistics.median(column) for column in zip(*stages, strict=True))
    return {
        "private_over_plain": round(statistics.median(ratios), 3),
        "stages_ms": {
            name: round(1000 * seconds, 2)
            for name, seconds in zip(("plain", "shards", "arithmetic", "other"), medians, strict=True)
        },
    }


def main(
    protocol: options.ProtocolsOption = options.PROTOCOLS,
    parts: options.EnsembleSizesOption = options.ENSEMBLE_SIZES,
    prompt_tokens: options.PromptTokensOption = options.PROMPT_TOKENS,
    streams: options.StreamsOption = options.STREAMS,
    sample: options.SampleOption = None,
    shards: Annotated[int, typer.Option(min=1, help="Shards that divide the parts, and the cores.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens a sequence.")] = 32,
    rounds: options.RoundsOption = 3,
    quick: options.QuickCellOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measures and prints the values of this module's description."""
    if quick:
        protocol, tokens, rounds = protocol[:1], 8, 1
        parts, prompt_tokens, streams = ([size] for size in QUICK)
    model, prompts = resolve(), LoadPrompts()
    result: dict[str, Any] = {"private_over_plain": {}, "stages_ms": {}}
    with started(model) as plain:
        for name, size in product(protocol, parts):
            deployment = Deployment(name, size, shards, sample)
            with deployed(plain, model, deployment) as bench:
                private(bench, prompts.questions(2, 16, 4))
                for length, concurrent in product(prompt_tokens, streams):
                    cell = f"{name},{size},{length},{concurrent}"
                    measurement = measured(bench, prompts, length, concurrent, tokens, rounds)
                    print(f"{cell}: {measurement}", file=sys.stderr)
                    for key, value in measurement.items():
                        result[key][cell] = value
    show(result, as_json)


if __name__ == "__main__":
    typer.run(main)
