"""The running service under load, side by side with a bare one: `python -m tests.benchmarks.load --json`.

The unmodified `openai` client streams completions over HTTP, so many at a time. The bare side (`bare.py`) decodes the
same rows per token with plain vLLM behind Ray Serve. For each number of concurrent streams, median over the rounds:

- `tokens_per_s`, `first_token_s` and `token_s` (of a stream, after its first token) at p50 and p99, `errors`;
- `ratio`: the service's tokens per second over the bare one's.

Rounds of both sides alternate, so that a noisy machine disturbs both alike, and the bare side is asked for the very
prompts and lengths that the service answered, since only private text may end by itself.

With `--memory N` instead: resident memory of the service's processes over N short requests.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import openai
import psutil
import typer

from tests.ensembles import write_ensemble
from tests.running import RunningService, configure, free_port, running

PARTS = 3
CONTEXT = 512
CACHE_GIB = 2
MODEL = "privmix"
PROMPT = " callers asked the clinic whether the doctor could see them on Thursday,"
SECTIONS: dict[str, dict[str, Any]] = {
    "privacy": {"q": 1.0, "radius": 0.39, "epsilon": 1e6, "tokens": 1},
    "engine": {"context_length": CONTEXT, "cache_gib": CACHE_GIB},
    "budget": {"ledger": "ledger.db", "lease_tokens": 256},
}
CORES = psutil.cpu_count() or 1
TIMEOUT_S = 300.0
SAMPLES = 20
SHORT = 2


@dataclass(frozen=True)
class Question:
    prompt: str
    tokens: int


@dataclass(frozen=True)
class Answer:
    """Seconds since the question, of the first and the last piece; `error` names what went wrong."""

    tokens: int
    first_s: float = 0.0
    last_s: float = 0.0
    error: str | None = None

    @property
    def token_s(self) -> float:
        return (self.last_s - self.first_s) / (self.tokens - 1)


@dataclass(frozen=True)
class Round:
    """What one side did with a list of questions."""

    answers: Sequence[Answer]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds


_numbers = count()


def questions(number: int, tokens: int, prompt: str = PROMPT) -> list[Question]:
    """No two begin alike, so that no side has a prompt in its prefix cache."""
    return [Question(f"{next(_numbers)}{prompt}", tokens) for _ in range(number)]


async def ask(client: openai.AsyncOpenAI, question: Question) -> Answer:
    started = time.perf_counter()
    tokens, times = 0, []
    try:
        chunks = await client.completions.create(
            model=MODEL,
            prompt=question.prompt,
            max_tokens=question.tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in chunks:
            times.append(time.perf_counter() - started)
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
    except openai.OpenAIError as error:
        return Answer(tokens, error=type(error).__name__)
    return Answer(tokens, times[0], times[-1])


async def drive(url: str, asked: Sequence[Question], streams: int) -> Round:
    """All questions, `streams` of them at a time; a stream that ends makes room for the next."""
    remaining = iter(enumerate(asked))
    answers: dict[int, Answer] = {}
    limits = httpx.Limits(max_connections=streams)
    http: Any = httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S)  # openai takes it, and declares httpx2's alone
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)

    async def one_after_the_other() -> None:
        for index, question in remaining:
            answers[index] = await ask(client, question)

    async with client:
        started = time.perf_counter()
        await asyncio.gather(*(one_after_the_other() for _ in range(streams)))
        return Round([answers[index] for index in range(len(asked))], time.perf_counter() - started)


@contextmanager
def bare(ensemble: Path, threads: int) -> Iterator[str]:
    """The other side; its URL."""
    port = free_port()
    command = [sys.executable, "-m", "tests.benchmarks.bare", str(port), str(ensemble / "parts")]
    command += ["--context-length", str(CONTEXT), "--cache-gib", str(CACHE_GIB), "--threads", str(threads)]
    log = (ensemble.parent / "bare.log").open("ab")
    process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(url, process)
        yield url
    finally:
        tree = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(TIMEOUT_S)
        for child in tree:
            if child.is_running():
                child.kill()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the bare side ended with {process.returncode}")
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.2)
    raise TimeoutError(f"the bare side did not answer within {TIMEOUT_S:g} s")


def compared(ours: str, theirs: str, streams: int, requests: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Both sides at so many concurrent streams."""
    played = [_both(ours, theirs, questions(requests, tokens), streams) for _ in range(rounds)]
    return {
        "ratio": _median(own.tokens_per_s / other.tokens_per_s for own, other in played),
        "service": described([own for own, _ in played]),
        "bare": described([other for _, other in played]),
    }


def _both(ours: str, theirs: str, asked: Sequence[Question], streams: int) -> tuple[Round, Round]:
    own = asyncio.run(drive(ours, asked, streams))
    same = [
        replace(question, tokens=max(1, answer.tokens)) for question, answer in zip(asked, own.answers, strict=True)
    ]
    return own, asyncio.run(drive(theirs, same, streams))


def described(rounds: Sequence[Round]) -> dict[str, Any]:
    answers = [answer for one in rounds for answer in one.answers]
    errors = Counter(answer.error for answer in answers if answer.error)
    whole = [answer for answer in answers if not answer.error]
    return {
        "tokens_per_s": _median(one.tokens_per_s for one in rounds),
        "first_token_s": _percentiles([answer.first_s for answer in whole]),
        "token_s": _percentiles([answer.token_s for answer in whole if answer.tokens > 1]),
        "tokens": sum(answer.tokens for answer in answers),
        "errors": dict(errors),
    }


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": round(float(np.percentile(seconds, percent)), 4) for percent in (50, 99)}


def memory(service: RunningService, requests: int, streams: int) -> dict[str, Any]:
    """Resident memory of the whole tree while so many short requests are answered, sampled when none is under way."""
    batch = max(1, requests // SAMPLES)
    answered, errors = [0], 0
    sizes = [_resident(service)]
    while answered[-1] < requests:
        done = asyncio.run(drive(service.base_url, questions(batch, SHORT, " callers"), streams))
        errors += sum(answer.error is not None for answer in done.answers)
        answered.append(answered[-1] + batch)
        sizes.append(_resident(service))
    later = len(sizes) // 2
    return {
        "requests": answered[-1],
        "errors": errors,
        "resident_mib": [round(sum(size.values()), 1) for size in sizes],
        "mib_per_1000_requests": {
            name: _slope(answered[later:], [size[name] for size in sizes[later:]]) for name in sorted(sizes[-1])
        },
    }


def _slope(answered: Sequence[int], mib: Sequence[float]) -> float:
    return round(1000 * statistics.linear_regression(answered, mib).slope, 3)


def _resident(service: RunningService) -> Counter[str]:
    """MiB by the title of the process; pages that several share (Ray's object store) count in each of them."""
    sizes: Counter[str] = Counter()
    for process in service.tree():
        with suppress(psutil.NoSuchProcess):
            title = Path(process.cmdline()[0]).name.partition(".")[0]
            sizes[title] += process.memory_info().rss / 2**20
    return sizes


def main(
    streams: Annotated[list[int], typer.Option(help="Concurrent streams; repeatable.")] = [1, 8, 32, 64],  # noqa: B006
    tokens: Annotated[int, typer.Option(help="Tokens a stream.")] = 48,
    requests: Annotated[int, typer.Option(help="Streams a round, one after another, for each concurrent one.")] = 1,
    rounds: Annotated[int, typer.Option(help="Alternating rounds of both sides; medians are compared.")] = 3,
    threads: Annotated[int, typer.Option(help="Of each engine; fewer than cores tell more on a busy machine.")] = CORES,
    memory_over: Annotated[int, typer.Option("--memory", help="Short requests of which to watch the memory.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what this module's description lists."""
    with tempfile.TemporaryDirectory(prefix="load-") as name:
        folder = Path(name)
        ensemble = write_ensemble(folder / "ensemble", PARTS)
        with running(configure(folder, ensemble, **SECTIONS, shards={"threads": threads})) as service:
            if memory_over:
                result = {"memory": memory(service, memory_over, max(streams))}
            else:
                with bare(ensemble, threads) as other:
                    _both(service.base_url, other, questions(4, 4), 4)
                    result = {
                        str(each): compared(service.base_url, other, each, each * requests, tokens, rounds)
                        for each in streams
                    }
    print(json.dumps(result) if as_json else "\n".join(f"{name}: {value}" for name, value in result.items()))


if __name__ == "__main__":
    typer.run(main)
