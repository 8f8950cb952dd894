"""Claim: each part can have two more adapters, trained on the halves of its users."""

from pathlib import Path

import pytest

from privmix.training.manifest import Manifest
from privmix.training.partition import half_of
from tests.support.training import PARTS, SALT, Ensemble, small_documents, write_corpus

pytestmark = pytest.mark.slow


def half_hashes(manifest: Manifest, half: int) -> list[str]:
    return [part.halves[half].sha256 for part in manifest.parts if part.halves]


@pytest.mark.parametrize("half", [0, 1])
def test_a_half_is_trained_on_its_users_alone(halved: Ensemble, tmp_path: Path, half: int) -> None:
    members = [document for document in small_documents() if half_of(document.user, SALT) == half]
    alone = halved.train(tmp_path / "alone", write_corpus(tmp_path / "corpus.jsonl", members)).manifest
    assert half_hashes(halved.trained.manifest, half) == [part.sha256 for part in alone.parts]
    assert [part.sha256 for part in halved.trained.manifest.parts] != [part.sha256 for part in alone.parts]


def test_halves_that_are_not_requested_are_removed(ensemble: Ensemble, halved: Ensemble, tmp_path: Path) -> None:
    directory = halved.copy(tmp_path / "copy")
    again = halved.train(directory)
    assert (again.trained, again.kept) == (0, PARTS)
    assert again.manifest == ensemble.trained.manifest
    assert {path.name for path in (directory / "parts").iterdir()} == {
        Path(part.path).name for part in again.manifest.parts
    }
