"""Claim: one user's text changes one part's model, and nothing else that a training leaves behind or says.

Audits fix the number of parts and attack the mechanism, so they cannot see a number that is computed from the corpus.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from privmix.engine.adapter_config import ADAPTER_FILES
from privmix.foundation.files import digest_files
from privmix.training.corpus import Document
from privmix.training.manifest import Manifest
from privmix.training.partition import part_of
from privmix_cluster.commands import train
from tests.support.cli import privmix
from tests.support.neighbouring import unequal
from tests.support.ray_cluster import ray_cluster
from tests.support.training import write_corpus

SALT = bytes(range(32))
USERS, PARTS = 95, 4
NEWCOMER = Document("the newcomer", "The code of the gate is heliotrope, and nobody else may know it.")


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """One Ray for all trainings in this process."""
    with ray_cluster(2):
        yield


def trained(folder: Path, documents: Sequence[Document], words: Sequence[str]) -> tuple[Manifest, dict[str, Any]]:
    """Trains with the command's defaults, in this process, so that a test can plant a fault in it.

    Returns:
        the manifest, and all that the newcomer may not change: what is said, and everything but one part's model.
    """
    folder.mkdir()
    directory, salt = folder / "ensemble", folder / "salt"
    corpus = write_corpus(folder / "corpus.jsonl", list(documents))
    salt.write_bytes(SALT)
    output = ["--output", str(directory), "--salt-file", str(salt), "--json", "--parts", str(PARTS)]
    done = privmix("train", str(corpus), *output, *words)
    assert done.exit_code == 0, done.output
    shown = {name: json.loads(done.stdout)[name] for name in ("parts", "adapters", "skipped")}
    # Several processes train, and the order in which they end follows the machine's load.
    lines = sorted(re.sub(r" \(\d+ of \d+\)$", "", line) for line in done.stderr.splitlines() if "parts:" in line)
    manifest = Manifest.load(directory)
    left_out = part_of(NEWCOMER.user, SALT, len(manifest.parts))
    record = json.loads(manifest.model_dump_json(exclude={"ensemble"}))
    for adapter in (record["parts"][left_out], *(record["parts"][left_out]["halves"] or ())):
        del adapter["path"], adapter["sha256"]
    others = [adapter for part in manifest.parts if part.index != left_out for adapter in (part, *(part.halves or ()))]
    digests = {adapter.name: digest_files(directory / adapter.path, ADAPTER_FILES) for adapter in others}
    return manifest, {"shown": shown, "said": lines, "manifest": record, "adapters": digests}


def differences(folder: Path, *words: str) -> tuple[list[str], list[Manifest]]:
    """Trains without the newcomer and with; returns what differs that may not, and both manifests."""
    documents = [Document(f"user-{n}", f"The kitchen of user {n} is painted in heliotrope.") for n in range(USERS)]
    without, view = trained(folder / "without", documents, words)
    present, other = trained(folder / "with", [*documents, NEWCOMER], words)
    return list(unequal(view, other)), [without, present]


@pytest.mark.slow
def test_a_user_changes_one_text_and_its_halves_and_nothing_else(one_ray: None, tmp_path: Path) -> None:
    found, manifests = differences(tmp_path, "--part-kind", "text", "--halves")
    assert found == []
    without, present = (each.parts[part_of(NEWCOMER.user, SALT, PARTS)].sha256 for each in manifests)
    assert without != present, "the newcomer is in it"


@pytest.mark.slow
def test_a_number_of_parts_that_is_counted_in_the_corpus_is_found(
    one_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other audits could not see this fault: 96 users instead of 95 gave 12 parts instead of 8."""

    def counted(_: object, output: Path) -> int:
        users = len((output.parent / "corpus.jsonl").read_text().splitlines())
        return users // 8 if users > USERS else 8

    monkeypatch.setattr(train, "_number_of_parts", counted)
    found, _ = differences(tmp_path, "--part-kind", "text")
    assert "/shown/parts: '8' without the user, '12' with" in found


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_user_changes_one_adapter_and_nothing_else(one_ray: None, tmp_path: Path) -> None:
    assert differences(tmp_path)[0] == []
