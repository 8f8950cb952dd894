"""Claim: one user's text changes one part's model and nothing else that a client can see, from the corpus to HTTP.

The other audits fix the number of parts and attack the mechanism. This one runs the commands with their defaults on two
corpora that differ in one user, and compares what they leave behind.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cluster.cli import app
from services.files import digest_files
from services.training.corpus import Document
from services.training.manifest import ADAPTER_FILES, Manifest
from services.training.partition import part_of
from tests.running import configure, running

SALT = bytes(range(32))
USERS = 95
"""With this number, `privmix train` once counted the users: one more changed the number of parts from 8 to 12."""
NEWCOMER = Document("the newcomer", "The code of the gate is heliotrope, and nobody else may know it.")
ROUTES = ("/v1/models", "/v1/privacy", "/readyz", "/health", "/version", "/openapi.json", "/console")
QUESTIONS: tuple[dict[str, Any], ...] = (
    {"prompt": "The code of the gate is", "max_tokens": 4},
    {"prompt": "The code of the gate is", "max_tokens": 10_000},
    {"prompt": "gate " * 2000, "max_tokens": 4},
    {"prompt": "The code of the gate is", "max_tokens": 4, "logprobs": 5},
)


@dataclass(frozen=True)
class World:
    """Holds an ensemble that the commands made."""

    directory: Path
    output: str
    manifest: Manifest

    def adapters(self, left_out: int) -> dict[str, str]:
        """Returns the digest of each adapter's files, except those of one part."""
        parts = (part for part in self.manifest.parts if part.index != left_out)
        return {part.name: digest_files(self.directory / part.path, ADAPTER_FILES) for part in parts}

    def public(self, left_out: int) -> dict[str, Any]:
        """Returns the manifest without the random id of the ensemble and what depends on one part's text.

        The digest of the corpus's marks, which are keyed by the salt, is in the manifest for later trainings. No client
        sees it, which `seen` shows.
        """
        record: dict[str, Any] = json.loads(self.manifest.model_dump_json(exclude={"ensemble", "marks"}))
        for field in ("path", "sha256", "size_bucket"):
            record["parts"][left_out].pop(field)
        return record


def made(folder: Path, documents: list[Document], *options: str) -> World:
    """Trains an ensemble with the command's defaults."""
    folder.mkdir()
    corpus, salt = folder / "corpus.jsonl", folder / "salt"
    corpus.write_text("".join(json.dumps(asdict(document)) + "\n" for document in documents))
    salt.write_bytes(SALT)
    words = ["--output", str(folder / "ensemble"), "--salt-file", str(salt), "--users", "100", *options]
    trained = CliRunner().invoke(app, ["train", str(corpus), *words, "--json"])
    assert trained.exit_code == 0, trained.output
    summary = json.loads(trained.stdout)
    shown = {name: summary[name] for name in ("parts", "adapters", "trained", "kept", "skipped", "left_out")}
    # Several processes train, and the order in which they end follows the machine's load.
    told = sorted(re.sub(r" \(\d+ of \d+\)$", "", line) for line in trained.stderr.splitlines())
    return World(folder / "ensemble", json.dumps([shown, told]), Manifest.load(folder / "ensemble"))


def neighbours(folder: Path, *options: str) -> tuple[World, World]:
    documents = [Document(f"user-{n}", f"The kitchen of user {n} is painted in heliotrope.") for n in range(USERS)]
    without = made(folder / "without", documents, *options)
    return without, made(folder / "with", [*documents, NEWCOMER], *options)


def assert_only_one_part_differs(without: World, present: World) -> None:
    parts = len(present.manifest.parts)
    changed = part_of(NEWCOMER.user, SALT, parts)
    assert without.public(changed) == present.public(changed)
    assert without.adapters(changed) == present.adapters(changed)
    assert without.manifest.parts[changed].sha256 != present.manifest.parts[changed].sha256, "the newcomer is in it"


@pytest.mark.slow
def test_a_user_changes_one_text_and_nothing_else(tmp_path: Path) -> None:
    without, present = neighbours(tmp_path, "--attention", "text")
    assert_only_one_part_differs(without, present)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_user_changes_one_adapter_and_nothing_that_a_client_sees(tmp_path: Path) -> None:
    without, present = neighbours(tmp_path)
    assert_only_one_part_differs(without, present)
    assert seen(without) == seen(present)


def seen(world: World) -> dict[str, Any]:
    """Returns what a client of a new service sees, without the text of answers, ids, and times."""
    answers: dict[str, Any] = {"train": world.output}
    with running(configure(world.directory.parent, world.directory)) as service:
        with httpx.Client(base_url=service.base_url, timeout=300) as client:
            for question in QUESTIONS:
                answer = client.post("/v1/completions", json={"model": "privmix", "ignore_eos": True, **question})
                answers[json.dumps(question)[:80]] = _public(answer)
            for route in ROUTES:
                answers[route] = _public(client.get(route))
        for secret in (world.manifest.ensemble, service.base_url, str(service.base_url).rpartition(":")[2]):
            answers = json.loads(json.dumps(answers).replace(secret, "its own"))
    return answers


def _public(answer: httpx.Response) -> Any:
    """Returns status, header names and body of an answer."""
    body = answer.json() if answer.headers.get("content-type", "").startswith("application/json") else answer.text
    return answer.status_code, sorted(answer.headers), _without(body)


def _without(body: Any) -> Any:
    match body:
        case dict():
            own = {"id", "created", "text", "started", "at", "request_id"}
            return {name: _without(value) for name, value in body.items() if name not in own}
        case list():
            return [_without(value) for value in body]
    return body
