"""Compares what `privmix train` makes of two neighbouring corpora, where only one part may differ.

Audits fix the number of parts and attack the mechanism, so they cannot see a number that is computed from the corpus.
This comparison trains with the defaults on two corpora that differ in one user, and compares everything but one part's
model: the manifest, the adapters, and what the command says. `tests/cluster/test_individual.py` serves such ensembles.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privmix.foundation.files import digest_files
from privmix.training.corpus import Document
from privmix.training.manifest import ADAPTER_FILES, Manifest
from privmix.training.partition import part_of

SALT = bytes(range(32))
USERS, PARTS = 95, 4
NEWCOMER = Document("the newcomer", "The code of the gate is heliotrope, and nobody else may know it.")

Command = Callable[[Sequence[str]], str]
"""Runs `privmix` with these words and returns its standard output and, after an empty line, what it says."""


@dataclass(frozen=True)
class PipelineWorld:
    """Holds an ensemble that the commands made, and what they said."""

    directory: Path
    said: str
    manifest: Manifest


def train_worlds(folder: Path, run: Command, *words: str) -> tuple[PipelineWorld, PipelineWorld]:
    """Trains an ensemble without the newcomer and one with, with the command's defaults and further `words`."""
    documents = [Document(f"user-{n}", f"The kitchen of user {n} is painted in heliotrope.") for n in range(USERS)]
    without = _train(folder / "without", documents, words, run)
    return without, _train(folder / "with", [*documents, NEWCOMER], words, run)


def _train(folder: Path, documents: Sequence[Document], words: Sequence[str], run: Command) -> PipelineWorld:
    folder.mkdir(parents=True, exist_ok=True)
    corpus, salt, directory = folder / "corpus.jsonl", folder / "salt", folder / "ensemble"
    corpus.write_text(
        "".join(json.dumps({"user": document.user, "text": document.text}) + "\n" for document in documents)
    )
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
    return tuple(unequal(first, second))


def _adapters(world: PipelineWorld, left_out: int) -> dict[str, str]:
    """Returns the digest of each adapter's files, except those of one part."""
    adapters = [
        adapter for part in world.manifest.parts if part.index != left_out for adapter in (part, *(part.halves or ()))
    ]
    return {adapter.name: digest_files(world.directory / adapter.path, ADAPTER_FILES) for adapter in adapters}


def _public(manifest: Manifest, left_out: int) -> dict[str, Any]:
    """Returns the manifest without the random id of the ensemble and what depends on one part's text."""
    record: dict[str, Any] = json.loads(manifest.model_dump_json(exclude={"ensemble"}))
    for adapter in (record["parts"][left_out], *(record["parts"][left_out]["halves"] or ())):
        for field in ("path", "sha256"):
            adapter.pop(field)
    return record


def unequal(first: Any, second: Any, place: str = "") -> Iterator[str]:
    """Yields what differs between two views, as sentences."""
    match first, second:
        case dict(), dict():
            for name in sorted(first.keys() | second.keys()):
                yield from unequal(first.get(name), second.get(name), f"{place}/{name}")
        case [*ones], [*others] if len(ones) == len(others):
            for number, (one, other) in enumerate(zip(ones, others, strict=True)):
                yield from unequal(one, other, f"{place}/{number}")
        case _ if first != second:
            yield f"{place}: {str(first)[:80]!r} without the user, {str(second)[:80]!r} with"
