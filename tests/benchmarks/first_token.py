"""Measures what a structure costs an answer in time: `python -m tests.benchmarks.first_token --json`.

The whole service streams chats without a structure, with a schema that no earlier request had, and with a known one, in
turns of all three, to one client at a time:

- `new_over_none`, `known_over_none`: the medians of the seconds from the request to the first token, over those without
  a structure. The target of the first is at most 1.2. `first_token_s` has the seconds.

Then clients stream at once, all without a structure or all with one, in turns:

- `step_over_none`: the median of the seconds between two sampled tokens with a structure, over that without. A step
  reads the tokens that were forced before it, too. `step_s` has the seconds.
- `position_of_step`: the time of a processor to find what follows a token, over a step without a structure. The target
  is at most 0.05.

`stages_ms` are medians over new schemas, in this process: the time of a processor to `translate` one, to `compile` it,
to find its `start` (with a compilation more), and between two sampled tokens (`position`, with the greatest), and the
time in which a trial does all but the last (`trial`).

The schemas have 50 properties of eight kinds, half of which are required. `--quick` measures each once.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import typer

from privmix.coordinator.text import Detokenizer
from privmix.structure.compiler import begun, compiled
from privmix.structure.grammar import of_json_schema
from privmix.structure.matcher import Matcher
from privmix.structure.trials import Trials
from privmix.training.public_model import resolve
from privmix_cluster.options import JsonOption
from tests.benchmarks.load import CONTEXT, PRIVACY, SECTIONS, TEXT
from tests.benchmarks.options import show
from tests.ensembles import usual_layers, write_ensemble
from tests.running import configure, running

T = TypeVar("T")

PROPERTIES = 50
PARTS = 4
TOKENS = 640
"""Of an answer: more than the shortest answer to a schema has."""
TIMEOUT_S = 120.0
PAUSE_S = 0.05
"""After a client has left, until its answer is cancelled: it would share steps with the next one."""
KINDS = ("none", "new", "known")
DRAWN = 64
SHORT = 256
"""The tokens among which the texts of stages choose: of the first of a vocabulary many are single characters."""


def new_schema(number: int) -> dict[str, Any]:
    """Returns a schema that differs from those of all other numbers in each name."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 60},
        {"type": "integer", "minimum": 0},
        {"type": "boolean"},
        {"enum": [f"value {number} {item}" for item in range(6)]},
        {"type": "array", "items": {"type": "string"}},
        {"type": "number"},
        {"type": "string", "format": "date"},
        {"type": "string"},
    ]
    names = [f"field_{number}_{index}" for index in range(PROPERTIES)]
    properties = {name: kinds[index % len(kinds)] for index, name in enumerate(names)}
    return {"type": "object", "properties": properties, "required": names[::2], "additionalProperties": False}


class Questions:
    """Makes requests for chats that all begin differently, so that no prefix cache contains one."""

    def __init__(self, prompt_tokens: int, tokens: int) -> None:
        self._words = " ".join((TEXT * (1 + prompt_tokens // 16)).split()[: round(prompt_tokens * 0.75)])
        self._tokens = tokens
        self._numbers = count()
        self._schemas = count()
        self._known = self._format()

    def _format(self) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "a", "schema": new_schema(next(self._schemas))}}

    def __call__(self, kind: str) -> dict[str, Any]:
        question = {
            "model": "privmix",
            "messages": [{"role": "user", "content": f"{next(self._numbers)} {self._words}"}],
            "max_tokens": self._tokens,
            "stream": True,
            "ignore_eos": True,
        }
        formats = {"new": self._format, "known": lambda: self._known}
        return question if kind == "none" else question | {"response_format": formats[kind]()}


async def pieces(http: httpx.AsyncClient, question: dict[str, Any], most: int) -> list[float]:
    """Returns the seconds until each of the first pieces of an answer came, and leaves."""
    began, seconds = time.perf_counter(), []
    async with http.stream("POST", "/v1/chat/completions", json=question) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"the service answered {answer.status_code}: {(await answer.aread())[:500]!r}")
        async for line in answer.aiter_lines():
            if '"content":' in line and '"content":""' not in line:
                seconds.append(time.perf_counter() - began)
            if len(seconds) == most:
                break
    return seconds


async def first_tokens(url: str, questions: Questions, requests: int) -> dict[str, list[float]]:
    """Returns the seconds to the first token of each kind of request, of one client after another."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        for number in range(requests + 1):
            for kind in KINDS:
                (seconds,) = await pieces(http, questions(kind), 1)
                if number:  # the first of each kind loads what is loaded at the first request
                    found[kind].append(seconds)
                await asyncio.sleep(PAUSE_S)
    return found


async def steps(url: str, questions: Questions, kind: str, streams: int, most: int) -> list[float]:
    """Returns the seconds between two pieces of answers to clients at once."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        answers = await asyncio.gather(*(pieces(http, questions(kind), most) for _ in range(streams)))
    return [later - earlier for times in answers for earlier, later in pairwise(times[1:])]


def stages(schemas: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the milliseconds of the work on new schemas and on the tokens of one answer to each."""
    vocabulary = Detokenizer.load(resolve()).vocabulary()
    spent: dict[str, list[float]] = {name: [] for name in ("translate", "compile", "start", "position")}
    for schema in schemas:
        grammar = _timed(spent["translate"], partial(of_json_schema, schema))
        _timed(spent["compile"], partial(compiled, grammar, vocabulary))
        matcher, _ = _timed(spent["start"], partial(begun, grammar, vocabulary))
        _follow(matcher, random.Random(str(schema)), spent["position"])
    spent["trial"] = asyncio.run(_tried(schemas))
    measured = {name: round(statistics.median(values), 2) for name, values in spent.items()}
    return {**measured, "position_most": round(max(spent["position"]), 2)}


def _follow(matcher: Matcher, chance: random.Random, spent: list[float]) -> None:
    """Draws a text of up to `DRAWN` sampled tokens."""
    tokens: tuple[int, ...] = ()
    position = matcher.after(tokens)
    for _ in range(DRAWN):
        if position.complete:
            break
        bits = int.from_bytes(position.legal, "little")
        legal = [token for token in range(bits.bit_length()) if bits >> token & 1]
        tokens = (*tokens, *position.forced, chance.choice(legal[:SHORT]))
        position = _timed(spent, partial(matcher.after, tokens))


async def _tried(schemas: Sequence[dict[str, Any]]) -> list[float]:
    trials = Trials(Detokenizer.load(resolve()).described)
    try:
        await trials.grammar("choice", ["a process starts with the first grammar"])
        spent: list[float] = []
        for schema in schemas:
            began = time.perf_counter()
            await trials.grammar("json", schema)
            spent.append((time.perf_counter() - began) * 1e3)
        return spent
    finally:
        trials.close()


def _timed(spent: list[float], work: Callable[[], T]) -> T:
    began = time.thread_time()
    done = work()
    spent.append((time.thread_time() - began) * 1e3)
    return done


def main(
    requests: Annotated[int, typer.Option(min=1, help="Of each kind, for one prompt length.")] = 30,
    prompt_tokens: Annotated[list[int], typer.Option(help="Of each prompt, about; repeatable.")] = [64, 512],  # noqa: B006
    streams: Annotated[int, typer.Option(min=1, help="Concurrent, for the steps.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds of steps.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Each once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measures and prints the values of this module's description."""
    if quick:
        requests, prompt_tokens, streams, rounds = 1, [16], 1, 1
    result: dict[str, Any] = {"stages_ms": stages([new_schema(-number) for number in range(1, 1 + requests)])}
    with tempfile.TemporaryDirectory(prefix="first-token-") as name:
        folder = Path(name)
        sections = {**SECTIONS, "http": {"max_tokens": TOKENS}, "privacy": {"q": 0.5, **PRIVACY}}
        sections["engine"] = SECTIONS["engine"] | {"context_length": 2 * CONTEXT}
        ensemble = write_ensemble(folder / "ensemble", PARTS, layers=usual_layers(resolve()))
        with running(configure(folder, ensemble, **sections)) as service:
            for length in prompt_tokens:
                questions = Questions(length, TOKENS)
                found = asyncio.run(first_tokens(service.base_url, questions, requests))
                result[f"prompt of {length}"] = _compared(found)
            played: dict[str, list[float]] = {kind: [] for kind in ("none", "known")}
            for _ in range(rounds):
                for kind, gaps in played.items():
                    gaps += asyncio.run(
                        steps(service.base_url, Questions(16, TOKENS), kind, streams, 4 if quick else 40)
                    )
    medians = {kind: statistics.median(gaps) for kind, gaps in played.items()}
    result["step_over_none"] = round(medians["known"] / medians["none"], 3)
    result["position_of_step"] = round(result["stages_ms"]["position"] / 1e3 / medians["none"], 4)
    result["step_s"] = {kind: round(median, 4) for kind, median in medians.items()}
    show(result, as_json)


def _compared(found: dict[str, list[float]]) -> dict[str, Any]:
    medians = {kind: statistics.median(seconds) for kind, seconds in found.items()}
    return {
        "new_over_none": round(medians["new"] / medians["none"], 3),
        "known_over_none": round(medians["known"] / medians["none"], 3),
        "first_token_s": {kind: round(median, 4) for kind, median in medians.items()},
    }


if __name__ == "__main__":
    typer.run(main)
