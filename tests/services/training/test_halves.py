"""Claim: each part can have two more adapters, trained on the halves of its users."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from privmix.training.corpus import Document
from privmix.training.manifest import ADAPTER_FILES, Manifest
from privmix.training.partition import half_of, part_of
from tests.support.training import EMPTY_PART, PARTS, SALT, Ensemble, small_documents, write_corpus

pytestmark = pytest.mark.slow


def half_hashes(manifest: Manifest, half: int) -> list[str]:
    return [part.halves[half].sha256 for part in manifest.parts if part.halves]


@pytest.mark.parametrize("half", [0, 1])
def test_a_half_is_trained_on_its_users_alone(halved: Ensemble, tmp_path: Path, half: int) -> None:
    members = [document for document in small_documents() if half_of(document.user, SALT) == half]
    alone = halved.train(tmp_path / "alone", write_corpus(tmp_path / "corpus.jsonl", members)).manifest
    assert half_hashes(halved.trained.manifest, half) == [part.sha256 for part in alone.parts]
    assert [part.sha256 for part in halved.trained.manifest.parts] != [part.sha256 for part in alone.parts]


def test_half_without_text_is_the_public_model(halved: Ensemble) -> None:
    manifest = halved.trained.manifest
    halves = {half.name: half for part in manifest.parts for half in part.halves or ()}
    full = {
        f"part-{part_of(one.user, SALT, PARTS):03d}{'ab'[half_of(one.user, SALT)]}": one for one in small_documents()
    }
    without = halves.keys() - full.keys()
    # Both halves of the empty part, and one half of a part whose users are all in the other half.
    assert {name[:-1] for name in without} > {f"part-{EMPTY_PART:03d}"}
    for name, half in halves.items():
        weights = load_file(manifest.adapter_path(halved.directory, half) / ADAPTER_FILES[1])
        changed = [bool(tensor.any()) for key, tensor in weights.items() if "lora_B" in key]
        assert changed
        assert any(changed) == (name in full)


def test_one_user_changes_only_a_part_and_one_of_its_halves(halved: Ensemble, tmp_path: Path) -> None:
    documents = small_documents()
    changed = Document(documents[0].user, documents[0].text.replace("ninth", "tenth"))
    corpus = write_corpus(tmp_path / "corpus.jsonl", [changed, *documents[1:]])
    directory = halved.copy(tmp_path / "copy")
    again = halved.train(directory, corpus, halves=True)
    assert (again.trained, again.kept) == (2, 3 * PARTS - 2)
    before = {adapter.name: adapter for adapter in halved.trained.manifest.adapters}
    differ = [adapter.name for adapter in again.manifest.adapters if adapter != before[adapter.name]]
    part = f"part-{part_of(changed.user, SALT, PARTS):03d}"
    # A part's entry contains the entries of its halves.
    assert differ == [part, part + "ab"[half_of(changed.user, SALT)]]


def test_halves_that_are_not_requested_are_removed(ensemble: Ensemble, halved: Ensemble, tmp_path: Path) -> None:
    directory = halved.copy(tmp_path / "copy")
    again = halved.train(directory)
    assert (again.trained, again.kept) == (0, PARTS)
    assert again.manifest == ensemble.trained.manifest
    assert {path.name for path in (directory / "parts").iterdir()} == {
        Path(part.path).name for part in again.manifest.parts
    }
