"""Measures the cost of privacy for a user: `python -m tests.benchmarks.load --json` prints `{"private_over_plain": …}`.

The unmodified `openai` client streams completions over HTTP from the whole service, and from the alternative without
privacy: the same model in plain vLLM behind HAProxy and Ray Serve (`plain.py`). `private_over_plain` is the ratio of
their tokens per second, for each cell `PROTOCOL,PARTS,PROMPT TOKENS,STREAMS`, with the parts that `exponential` draws
as `exponential/SAMPLE`. In addition, for each cell and both sides:

- `tokens_per_s`; `first_token_s` and `token_s` (of a stream, after its first token) at p50 and p99; `errors`;
- of the service alone `processor_ms`, for a token: of each of `PROCESSES`.

Rounds of both sides alternate and medians are compared, so that other load affects both equally. The plain side gets
the prompts and lengths of the service's answers, because only private text may end early.

Both sides share a GPU if there is one; while one is measured, the other is idle. `--shape` serves a model of a known
shape with random weights, such as one of 8B parameters.

`--quick` measures one small cell once, which tells only whether the program runs.
"""

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count, product
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import openai
import psutil
import torch
import typer
from transformers import AutoTokenizer

from privmix.training.partition import Partition
from privmix.training.public_model import resolve
from privmix_cluster.options import JsonOption
from tests.benchmarks import options
from tests.benchmarks.options import show
from tests.benchmarks.shapes import SHAPES, write_model, write_readers
from tests.ensembles import usual_layers, write_ensemble, write_manifest
from tests.running import RunningService, configure, free_port, running
from tests.tiny import copy_tokenizer

CONTEXT = 1024
CACHE_GIB = 4
MODEL = "privmix"
TEXT = "The caller questions the clinic whether the doctor could see them on Thursday, because their knee still hurt. "
ON_GPU = torch.cuda.is_available()
GPU_SHARE = 0.42
"""The share of a GPU's memory that each side reserves."""
SECTIONS: dict[str, dict[str, Any]] = {
    "engine": {"context_length": CONTEXT, "cache_gib": CACHE_GIB, "gpu_memory_utilization": GPU_SHARE},
    "budget": {"ledger": "ledger.db", "lease_tokens": 256},
    "coordinator": {"max_live": 128},
    "http": {"max_tokens": 512},
}
PRIVACY = {"epsilon": 1000.0, "tokens": 1_000_000}
"""Enough for every token of a run; the work of a token does not depend on it."""
CORES = psutil.cpu_count() or 1
TIMEOUT_S = 600.0
DISTINCT = 8
"""The number of different adapters; the work of a token does not depend on it."""
PROCESSES = ("haproxy", "ServeReplica:privmix:gateway", "ray::Coordinator", "ray::Shard")
PROTOCOLS = ["pmixed", "exponential"]
PARTS = [8, 80, 400]
ALL: list[int] = []
PROMPT_TOKENS = [64, 512]
STREAMS = [1, 8, 32, 128]
QUICK = (8, 64, 2)
"""The number of parts, of prompt tokens and of streams."""


@dataclass(frozen=True)
class LoadRequest:
    prompt: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class TimedAnswer:
    """The seconds from the request to the first and the last piece; `error` describes a failure."""

    tokens: int
    first_s: float = 0.0
    last_s: float = 0.0
    error: str | None = None

    @property
    def token_s(self) -> float:
        return (self.last_s - self.first_s) / (self.tokens - 1)


@dataclass(frozen=True)
class Round:
    """One side's answers to a list of questions."""

    answers: Sequence[TimedAnswer]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds


class LoadPrompts:
    """Prompts of an exact number of tokens. All begin differently, so no prefix cache contains one."""

    def __init__(self) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(resolve())
        self._numbers = count()

    def questions(self, number: int, prompt_tokens: int, tokens: int) -> list[LoadRequest]:
        texts = (f"{next(self._numbers)} {TEXT * (1 + prompt_tokens // 8)}" for _ in range(number))
        return [LoadRequest(tuple(self._tokenizer(text).input_ids[:prompt_tokens]), tokens) for text in texts]


async def ask(client: openai.AsyncOpenAI, question: LoadRequest) -> TimedAnswer:
    started = time.perf_counter()
    tokens, times = 0, []
    try:
        chunks = await client.completions.create(
            model=MODEL,
            prompt=list(question.prompt),
            max_tokens=question.tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in chunks:
            times.append(time.perf_counter() - started)
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
    except openai.OpenAIError as error:
        return TimedAnswer(tokens, error=type(error).__name__)
    return TimedAnswer(tokens, times[0], times[-1])


async def drive(url: str, questions: Sequence[LoadRequest], streams: int) -> Round:
    """Sends all questions, `streams` of them concurrently; when a stream ends, the next one starts."""
    remaining = iter(enumerate(questions))
    answers: dict[int, TimedAnswer] = {}
    limits = httpx.Limits(max_connections=streams)
    # Any, because openai accepts this client, but declares only httpx2's type.
    http: Any = httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)

    async def one_after_the_other() -> None:
        for index, question in remaining:
            answers[index] = await ask(client, question)

    async with client:
        started = time.perf_counter()
        await asyncio.gather(*(one_after_the_other() for _ in range(streams)))
        return Round([answers[index] for index in range(len(questions))], time.perf_counter() - started)


@contextmanager
def plain(folder: Path, model: Path, threads: int) -> Iterator[str]:
    """Runs the plain side and yields its URL."""
    port = free_port()
    command = [sys.executable, "-m", "tests.benchmarks.plain", str(port), str(model)]
    command += ["--context-length", str(CONTEXT), "--cache-gib", str(CACHE_GIB), "--threads", str(threads)]
    command += ["--gpu-share", str(GPU_SHARE)]
    with (folder / "plain.log").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    it = RunningService(f"http://127.0.0.1:{port}", "plain", folder, folder, process)
    try:
        it.wait_until_healthy(TIMEOUT_S)
        yield it.base_url
    finally:
        it.stop()


def ensemble(folder: Path, parts: int, shape: str | None, model: Path) -> Path:
    """Writes an ensemble for one service."""
    if shape is None:
        return write_ensemble(folder, parts, distinct=DISTINCT, layers=usual_layers(model))
    names = [share.name for share in Partition(b"", parts, False).shares]
    write_readers(folder / "parts", names, SHAPES[shape], DISTINCT)
    return write_manifest(folder, parts, model)


@contextmanager
def private(ensemble: Path, mechanism: str, parts: int, shards: int, threads: int) -> Iterator[RunningService]:
    """Runs the service with an ensemble.

    Args:
        mechanism: the protocol, and after `/` the number of parts that it draws for a token.
    """
    protocol, _, sample = mechanism.partition("/")
    privacy: dict[str, Any] = {"protocol": protocol, **PRIVACY, **({"sample": int(sample)} if sample else {})}
    engine = {**SECTIONS["engine"], "cache_gib": CACHE_GIB / shards}
    reserved = {"num_cpus": 1 / shards, **({"num_gpus": 1 / shards} if ON_GPU else {})}
    divided = {"threads": max(1, threads // shards), "parts_per_shard": -(-parts // shards), **reserved}
    home = ensemble.with_name(f"{ensemble.name}-service")
    home.mkdir()
    with running(configure(home, ensemble, **{**SECTIONS, "engine": engine}, privacy=privacy, shards=divided)) as it:
        yield it


def compared(service: RunningService, other: str, rounds: Iterable[list[LoadRequest]], streams: int) -> dict[str, Any]:
    """Measures one cell: both sides with the same questions."""
    before = spent(service)
    played = [_both(service.base_url, other, questions, streams) for questions in rounds]
    ours, theirs = described([own for own, _ in played]), described([plain for _, plain in played])
    after = spent(service)
    ours["processor_ms"] = {name: round(1e3 * (after[name] - before[name]) / ours["tokens"], 3) for name in PROCESSES}
    whole = statistics.median(own.tokens_per_s / plain.tokens_per_s for own, plain in played)
    return {
        "private_over_plain": round(whole, 3),
        "private": ours,
        "plain": theirs,
    }


def spent(service: RunningService) -> dict[str, float]:
    """Returns the seconds of a processor that these processes have taken."""
    return {name: sum(service.actor(name).cpu_times()[:2]) for name in PROCESSES}


def _both(ours: str, theirs: str, questions: Sequence[LoadRequest], streams: int) -> tuple[Round, Round]:
    own = asyncio.run(drive(ours, questions, streams))
    same = [
        replace(question, tokens=max(1, answer.tokens)) for question, answer in zip(questions, own.answers, strict=True)
    ]
    return own, asyncio.run(drive(theirs, same, streams))


def described(rounds: Sequence[Round]) -> dict[str, Any]:
    answers = [answer for turn in rounds for answer in turn.answers]
    errors = Counter(answer.error for answer in answers if answer.error)
    whole = [answer for answer in answers if not answer.error]
    return {
        "tokens_per_s": _median(turn.tokens_per_s for turn in rounds),
        "first_token_s": _percentiles([answer.first_s for answer in whole]),
        "token_s": _percentiles([answer.token_s for answer in whole if answer.tokens > 1]),
        "tokens": sum(answer.tokens for answer in answers),
        "errors": dict(errors),
    }


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": round(float(np.percentile(seconds or [np.nan], percent)), 4) for percent in (50, 99)}


def main(
    protocol: Annotated[list[str], typer.Option(help="Repeatable.")] = PROTOCOLS,
    parts: Annotated[list[int], typer.Option(help="Of the ensemble; repeatable.")] = PARTS,
    sample: Annotated[list[int], typer.Option(help="Parts that `exponential` draws; repeatable. Default: all.")] = ALL,
    prompt_tokens: Annotated[list[int], typer.Option(help="Of each prompt; repeatable.")] = PROMPT_TOKENS,
    streams: Annotated[list[int], typer.Option(help="Concurrent; repeatable.")] = STREAMS,
    tokens: Annotated[int, typer.Option(help="Tokens a stream.")] = 64,
    requests: Annotated[int, typer.Option(help="Streams a round, one after another, for each concurrent one.")] = 1,
    rounds: Annotated[int, typer.Option(help="Alternating rounds of both sides; medians are compared.")] = 3,
    shape: Annotated[str | None, typer.Option(help=f"Of {', '.join(SHAPES)}, instead of the default model.")] = None,
    shards: Annotated[int, typer.Option(min=1, help="Shards that divide the parts and the machine.")] = 1,
    threads: Annotated[int, typer.Option(help="Of each engine; fewer than cores tell more on a busy machine.")] = CORES,
    quick: options.QuickCellOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measures and prints the values of this module's description."""
    if quick:
        protocol, tokens, rounds = protocol[:1], 8, 1
        parts, prompt_tokens, streams = ([size] for size in QUICK)
    drawn = {"exponential": [f"/{number}" for number in sample] or [""]}
    mechanisms = [name + number for name in protocol for number in drawn.get(name, [""])]
    prompts = LoadPrompts()
    result: dict[str, Any] = {"private_over_plain": {}, "cells": {}}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="load-")))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        model = resolve()
        if shape is not None:
            copy_tokenizer(folder / "model")
            model = write_model(folder / "model", SHAPES[shape])
        starting = pool.submit(stack.enter_context, plain(folder, model, threads))
        if ON_GPU:
            starting.result()  # an engine sizes its cache by what others leave free while it starts
        for number, (name, size) in enumerate(product(mechanisms, parts)):
            written = ensemble(folder / f"ensemble-{number}", size, shape, model)
            with private(written, name, size, shards, threads) as service:
                other = starting.result()
                _both(service.base_url, other, prompts.questions(4, 16, 4), 4)
                for length, concurrent in product(prompt_tokens, streams):
                    questions = (prompts.questions(concurrent * requests, length, tokens) for _ in range(rounds))
                    cell = f"{name},{size},{length},{concurrent}"
                    measured = compared(service, other, questions, concurrent)
                    result["private_over_plain"][cell] = measured.pop("private_over_plain")
                    result["cells"][cell] = measured
                    print(f"{cell}: {result['private_over_plain'][cell]} {measured}", file=sys.stderr)
    show(result, as_json)


if __name__ == "__main__":
    typer.run(main)
