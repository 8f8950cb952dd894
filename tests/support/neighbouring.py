"""Compares what two neighbouring corpora leave behind, from the commands to HTTP, where only one part may differ.

Audits fix the number of parts and attack the mechanism, so they cannot see a number that is computed from the corpus.
This comparison runs `privmix train` and `privmix serve` with their defaults on two corpora that differ in one
user, and compares everything but one part's model: the manifest, the adapters, what the command says, and each answer
that a client gets, without its text.
"""

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from privmix.foundation.errors import WorkError
from privmix.foundation.files import digest_files
from privmix.training.corpus import Document
from privmix.training.manifest import ADAPTER_FILES, Manifest
from privmix.training.partition import part_of

SALT = bytes(range(32))
USERS, PARTS = 95, 4
NEWCOMER = Document("the newcomer", "The code of the gate is heliotrope, and nobody else may know it.")
START_S, STOP_S = 480.0, 60.0

_PAGES = ("/openapi.json", "/docs", "/console")
_STREAMED = "/v1/console"
"""Shows the traffic of the last seconds. Its other fields are those of the routes that are compared."""
_COMPLETION: dict[str, Any] = {"model": "privmix", "ignore_eos": True, "prompt": "The code of the gate is"}
_QUESTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {**_COMPLETION, "max_tokens": 4}),
    ("/v1/completions", {**_COMPLETION, "max_tokens": 4, "stream": True}),
    ("/v1/completions", {**_COMPLETION, "max_tokens": 10_000}),
    ("/v1/completions", {**_COMPLETION, "max_tokens": 4, "prompt": "gate " * 2000}),
    ("/v1/completions", {**_COMPLETION, "max_tokens": 4, "logprobs": 5}),
    ("/tokenize", {"model": "privmix", "prompt": NEWCOMER.text}),
)
_OWN = re.compile(r"id|.*_id|.*_at|at|created|text|started|request_id|filename|bytes")
"""The fields that differ between two requests of one service, too: names, times, and the sampled text with its size."""

Command = Callable[[Sequence[str]], str]
"""Runs `privmix` with these words and returns its standard output and, after an empty line, what it says."""


@dataclass(frozen=True)
class PipelineWorld:
    """Holds an ensemble that the commands made, and what they said."""

    directory: Path
    said: str
    manifest: Manifest


def run_command(words: Sequence[str]) -> str:
    """Runs `privmix` in a process of its own.

    Raises:
        WorkError: the command failed.
    """
    done = subprocess.run([sys.executable, "-m", "privmix", *words], capture_output=True, text=True)
    if done.returncode:
        raise WorkError(f"privmix {words[0]} failed: {done.stderr[-1000:]}")
    return f"{done.stdout}\n\n{done.stderr}"


def train_worlds(
    folder: Path, words: Sequence[str] = (), run: Command = run_command
) -> tuple[PipelineWorld, PipelineWorld]:
    """Trains an ensemble without the newcomer and one with, with the command's defaults and further `words`.

    Raises:
        WorkError: a training failed.
    """
    documents = [Document(f"user-{n}", f"The kitchen of user {n} is painted in heliotrope.") for n in range(USERS)]
    without = _train(folder / "without", documents, words, run)
    return without, _train(folder / "with", [*documents, NEWCOMER], words, run)


def _train(folder: Path, documents: Sequence[Document], words: Sequence[str], run: Command) -> PipelineWorld:
    folder.mkdir(parents=True, exist_ok=True)
    corpus, salt, directory = folder / "corpus.jsonl", folder / "salt", folder / "ensemble"
    corpus.write_text("".join(json.dumps(document.row()) + "\n" for document in documents))
    salt.write_bytes(SALT)
    stated = [] if "--parts" in words else ["--parts", str(PARTS)]
    output = ["--output", str(directory), "--salt-file", str(salt), "--json"]
    summary, _, said = run(["train", str(corpus), *output, *stated, *words]).partition("\n\n")
    shown = {name: json.loads(summary)[name] for name in ("parts", "adapters", "skipped")}
    # Several processes train, and the order in which they end follows the machine's load.
    lines = sorted(re.sub(r" \(\d+ of \d+\)$", "", line) for line in said.splitlines() if "parts:" in line)
    return PipelineWorld(directory, json.dumps([shown, lines]), Manifest.load(directory))


def training_differences(without: PipelineWorld, present: PipelineWorld) -> tuple[str, ...]:
    """Returns what differs between the worlds besides one part's model, as sentences."""
    parts = len(present.manifest.parts)
    if len(without.manifest.parts) != parts:
        return (f"the number of parts: {len(without.manifest.parts)} without the user, {parts} with",)
    changed = part_of(NEWCOMER.user, SALT, parts)
    first, second = (
        {"said": world.said, "manifest": _public(world.manifest, changed), "adapters": _adapters(world, changed)}
        for world in (without, present)
    )
    return tuple(_unequal(first, second))


def _adapters(world: PipelineWorld, left_out: int) -> dict[str, str]:
    """Returns the digest of each adapter's files, except those of one part."""
    adapters = [
        adapter for part in world.manifest.parts if part.index != left_out for adapter in (part, *(part.halves or ()))
    ]
    return {adapter.name: digest_files(world.directory / adapter.path, ADAPTER_FILES) for adapter in adapters}


def _public(manifest: Manifest, left_out: int) -> dict[str, Any]:
    """Returns the manifest without the random id of the ensemble and what depends on one part's text.

    The digest of the corpus's marks, which are keyed by the salt, is in the manifest for later trainings. No client
    sees it, which `view` shows.
    """
    record: dict[str, Any] = json.loads(manifest.model_dump_json(exclude={"ensemble", "marks"}))
    for adapter in (record["parts"][left_out], *(record["parts"][left_out]["halves"] or ())):
        for field in ("path", "sha256"):
            adapter.pop(field)
    return record


def view(world: PipelineWorld) -> Any:
    """Serves the world's ensemble and returns what a client sees, without the text of answers, ids and times.

    Raises:
        WorkError: the service did not start.
    """
    with _serving(world) as (url, client):
        answers: dict[str, Any] = {
            f"{route} {json.dumps(question)[-60:]}": _answer(client.post(route, json=question))
            for route, question in _QUESTIONS
        }
        _wait_until_settled(client)
        description = client.get("/openapi.json").raise_for_status().json()
        answers |= {route: _answer(client.get(route)) for route in routes(description)}
    text = json.dumps(answers)
    for secret in (world.manifest.ensemble, url, url.rpartition(":")[2]):
        text = text.replace(secret, "its own")
    return json.loads(text)


def routes(description: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the pages, and the routes of an OpenAPI description that answer a GET without a parameter in the path."""
    documented = [path for path, methods in description["paths"].items() if "get" in methods and "{" not in path]
    return (*_PAGES, *(path for path in documented if path != _STREAMED))


def view_differences(without: Any, present: Any) -> tuple[str, ...]:
    """Returns what differs between two views, as sentences."""
    return tuple(_unequal(without, present))


def _unequal(first: Any, second: Any, place: str = "") -> Iterator[str]:
    match first, second:
        case dict(), dict():
            for name in sorted(first.keys() | second.keys()):
                yield from _unequal(first.get(name), second.get(name), f"{place}/{name}")
        case [*ones], [*others] if len(ones) == len(others):
            for number, (one, other) in enumerate(zip(ones, others, strict=True)):
                yield from _unequal(one, other, f"{place}/{number}")
        case _ if first != second:
            yield f"{place}: {str(first)[:80]!r} without the user, {str(second)[:80]!r} with"


def _answer(answer: httpx.Response) -> Any:
    """Returns status, header names and body of an answer. Of a stream, each kind of event once."""
    kind = answer.headers.get("content-type", "")
    if kind.startswith("application/json"):
        body = _shared(answer.json())
    elif kind.startswith("text/event-stream"):
        events = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: "))
        body = sorted({event if event == "[DONE]" else json.dumps(_shared(json.loads(event))) for event in events})
    else:
        body = answer.text
    return [answer.status_code, sorted(answer.headers), body]


def _shared(body: Any) -> Any:
    match body:
        case dict():
            return {name: _shared(value) for name, value in body.items() if not _OWN.fullmatch(name)}
        case list():
            return [_shared(value) for value in body]
    return body


def _wait_until_settled(client: httpx.Client) -> None:
    """Waits until no lease is open: how much of it is used depends on times."""
    before = -1
    while before != (before := client.get("/v1/privacy").json()["tokens_charged"]):
        time.sleep(2)


@contextmanager
def _serving(world: PipelineWorld) -> Iterator[tuple[str, httpx.Client]]:
    folder, port = world.directory.parent, _free_port()
    settings: Mapping[str, Any] = {
        "ensemble": str(world.directory),
        "namespace": folder.name,
        "privacy": {"epsilon": 8.0, "tokens": 20_000},
        "budget": {"ledger": "ledger.db", "lease_tokens": 16},
        "engine": {"context_length": 512, "cache_gib": 1},
        "http": {"port": port, "max_tokens": 256},
    }
    config, url = folder / "privmix.yaml", f"http://127.0.0.1:{port}"
    config.write_text(yaml.safe_dump(settings))
    with config.with_suffix(".log").open("wb") as log:
        words = [sys.executable, "-m", "privmix", "serve", "--config", str(config)]
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        try:
            with httpx.Client(base_url=url, timeout=300) as client:
                _wait_until_ready(process, client)
                yield url, client
        finally:
            process.terminate()
            process.wait(STOP_S)


def _wait_until_ready(process: "subprocess.Popen[bytes]", client: httpx.Client) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError):
            if client.get("/readyz").status_code == 200:
                return
        time.sleep(0.5)
    raise WorkError("the service did not start; its log is beside the ensemble")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
