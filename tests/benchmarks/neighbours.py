"""Measures what one key can do to the requests of another: `python -m tests.benchmarks.neighbours --json`.

The whole service answers a key that asks for short completions, first alone and then beside another key that misbehaves
in one way, in turns of both. For each way:

- `ratio`: the ordinary key's p99 beside the other key over its p99 alone. The target is at most `TARGET`.
- `p50`: the same of the median.
- `alone_s`, `beside_s`: the p99 in seconds; `failed`: ordinary requests that were not answered with 200.
- `sent`, `statuses`: what the other key sent, and how it was answered.

Each way is written to standard error once it is measured. The other key is a process of its own, which stands for
another machine: it gets the processor time that the service leaves. (Ray's workers have a low priority, so that a
client at the usual one would take their processors away, whatever it sends. And Linux gives each session as much time
as any other, whatever the priorities in it are, unless the session has one.) `--quick` measures each way with few
requests, which tells only whether the program runs.
"""

import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from privmix.database.service import ServiceDatabase
from privmix.keys.store import KeyStore
from privmix.training.public_model import resolve
from privmix_cluster.options import JsonOption
from tests.benchmarks.options import show
from tests.ensembles import usual_layers, write_ensemble
from tests.running import configure, running

TARGET = 2.0
PARTS = 4
TOKENS = 8
CLIENTS = 2
TIMEOUT_S = 120.0
LEAST_PRIORITY = 19
SECTIONS: dict[str, dict[str, Any]] = {
    "privacy": {"epsilon": 1000.0, "tokens": 1_000_000},
    "budget": {"ledger": "ledger.db", "lease_tokens": 256},
}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ASK = {"model": "privmix", "prompt": "The caller asks whether", "max_tokens": TOKENS, "ignore_eos": True}

Misuse = Callable[[httpx.AsyncClient, int], Awaitable[int]]
"""Misbehaves once, as the `number`-th time, and returns the status of the answer."""


async def grammars(http: httpx.AsyncClient, number: int) -> int:
    """Asks for a structure that no earlier request had, with hundreds of items."""
    schema = {"type": "array", "items": {"enum": [f"{number} {item}" for item in range(20)]}, "minItems": 300}
    return await _ask(http, CHATS, {**_chat(), "response_format": _of(schema), "max_tokens": 4})


async def references(http: httpx.AsyncClient, number: int) -> int:
    """Asks for a structure whose definitions refer to each other many times."""
    names = [f"a{number}_{depth}" for depth in range(60)]
    definitions = {
        name: {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in names[depth + 1 : depth + 9]] or [{"type": "null"}]}
        for depth, name in enumerate(names)
    }
    return await _ask(
        http, CHATS, {**_chat(), "response_format": _of({"$defs": definitions, "$ref": f"#/$defs/{names[0]}"})}
    )


async def prompts(http: httpx.AsyncClient, number: int) -> int:
    """Sends a prompt as long as a body may be, whose length is only known once it is tokens."""
    return await _ask(http, COMPLETIONS, {**ASK, "prompt": f"{number} " + "7" * 900_000})


async def large(http: httpx.AsyncClient, number: int) -> int:
    """Asks for the most choices of the longest answer."""
    return await _ask(http, COMPLETIONS, {**ASK, "prompt": f"{number} caller", "n": 8, "max_tokens": 256})


async def invalid(http: httpx.AsyncClient, number: int) -> int:
    """Sends requests that are refused, as fast as it can."""
    return await _ask(http, COMPLETIONS, {**ASK, "n": -1})


WAYS: dict[str, tuple[Misuse, int]] = {
    "grammars": (grammars, 8),
    "references": (references, 8),
    "prompts": (prompts, 4),
    "large": (large, 8),
    "invalid": (invalid, 16),
}
"""The ways, with the number of requests that are open at a time."""


def main(
    requests: Annotated[int, typer.Option(min=1, help="Ordinary requests of each side of a round.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of both sides.")] = 3,
    way: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(WAYS)}; repeatable. Default: all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="4 requests in one round.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what a key that misbehaves does to the requests of another."""
    requests, rounds = (4, 1) if quick else (requests, rounds)
    if unknown := set(way or ()) - set(WAYS):
        raise typer.BadParameter(f"way: {', '.join(sorted(unknown))}; known are {', '.join(WAYS)}")
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), way or list(WAYS), requests, rounds)
    show({"target": TARGET, "ways": measured}, as_json)


def measure(folder: Path, ways: Sequence[str], requests: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Measures each of the ways on one service."""
    store = KeyStore(ServiceDatabase(folder / "keys.db"))
    ordinary, other = (store.create(name)[1].text for name in ("ordinary", "other"))
    ensemble = write_ensemble(folder / "ensemble", PARTS, layers=usual_layers(resolve()))
    with running(configure(folder, ensemble, **SECTIONS)) as service:
        asyncio.run(ask(service.base_url, ordinary, 2 * CLIENTS))  # what is loaded at the first request
        measured = {}
        for name in ways:
            alone, beside, answers = [], [], Counter[int]()
            for _ in range(rounds):
                alone += asyncio.run(ask(service.base_url, ordinary, requests))
                with misbehaving(service.base_url, other, name) as statuses:
                    beside += asyncio.run(ask(service.base_url, ordinary, requests))
                answers += statuses()
            measured[name] = compared(alone, beside, answers)
            print(json.dumps({name: measured[name]}), file=sys.stderr, flush=True)
    return measured


def compared(
    alone: Sequence[tuple[float, int]], beside: Sequence[tuple[float, int]], answers: Counter[int]
) -> dict[str, Any]:
    """Returns the figures of one way, from the seconds and the statuses of the ordinary requests of both sides."""
    (median, last), (median_beside, last_beside) = (
        np.percentile([seconds for seconds, _ in side], [50, 99]) for side in (alone, beside)
    )
    return {
        "ratio": round(float(last_beside / last), 2),
        "p50": round(float(median_beside / median), 2),
        "alone_s": round(float(last), 3),
        "beside_s": round(float(last_beside), 3),
        "failed": sum(status != 200 for _, status in (*alone, *beside)),
        "sent": answers.total(),
        "statuses": {str(status): number for status, number in sorted(answers.items())},
    }


async def ask(url: str, key: str, requests: int) -> list[tuple[float, int]]:
    """Sends ordinary requests, `CLIENTS` at a time. Returns the seconds and the status of each."""
    numbers = iter(range(requests))
    answered: list[tuple[float, int]] = []

    async def client(http: httpx.AsyncClient) -> None:
        for _ in numbers:
            began = time.monotonic()
            status = await _ask(http, COMPLETIONS, ASK)
            answered.append((time.monotonic() - began, status))

    async with _client(url, key) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    return answered


@contextmanager
def misbehaving(url: str, key: str, name: str) -> Iterator[Callable[[], Counter[int]]]:
    """Misbehaves in one way until the block ends. Yields what returns the statuses of the answers after it."""
    context = multiprocessing.get_context("spawn")
    begun, stop, told = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=_misbehave, args=(url, key, name, begun, stop, told), daemon=True)
    process.start()
    statuses: Counter[int] = Counter()
    try:
        if not begun.wait(TIMEOUT_S):
            raise TimeoutError(f"no request of the other key ended within {TIMEOUT_S:g} s")
        yield lambda: statuses
    finally:
        stop.set()
        statuses.update(told.get(timeout=TIMEOUT_S))
        process.join()


def _misbehave(url: str, key: str, name: str, begun: Any, stop: Any, told: "Queue[Counter[int]]") -> None:
    os.nice(LEAST_PRIORITY)
    os.setsid()
    with suppress(FileNotFoundError):  # a kernel without groups of sessions
        Path("/proc/self/autogroup").write_text(str(LEAST_PRIORITY))
    told.put(asyncio.run(_repeat(url, key, *WAYS[name], begun, stop)))


async def _repeat(url: str, key: str, way: Misuse, at_once: int, begun: Any, stop: Any) -> Counter[int]:
    statuses: Counter[int] = Counter()
    numbers = count()

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            try:
                statuses[await way(http, number)] += 1
            except httpx.HTTPError:
                statuses[0] += 1
            begun.set()  # it has misbehaved before the ordinary key asks

    async with _client(url, key) as http:
        clients = [asyncio.create_task(client(http)) for _ in range(at_once)]
        await asyncio.to_thread(stop.wait)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return statuses


@asynccontextmanager
async def _client(url: str, key: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S) as http:
        yield http


async def _ask(http: httpx.AsyncClient, route: str, body: dict[str, Any]) -> int:
    return (await http.post(route, json=body)).status_code


def _chat() -> dict[str, Any]:
    return {"model": "privmix", "messages": [{"role": "user", "content": "Hello"}]}


def _of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


if __name__ == "__main__":
    typer.run(main)
