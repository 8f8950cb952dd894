"""Claim: an ensemble of texts needs no cluster, an error shows nothing of a text, and a salt is kept."""

from pathlib import Path

import pytest

from privmix.engine import part_text
from privmix.foundation import ray_session
from privmix.foundation.errors import InputError, WorkError
from privmix.training.corpus import Corpus, Document
from privmix.training.directory import SALT as SALT_FILE
from privmix.training.manifest import Manifest
from privmix.training.options import TrainingOptions
from privmix.training.plan import run_training
from privmix.training.train import plan
from tests.support.training import write_corpus


@pytest.fixture
def room(tmp_path: Path) -> "Room":
    return Room(tmp_path)


class Room:
    """Holds an ensemble of texts, which is made in an instant."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.directory = folder / "ensemble"

    def train(self, *users: str) -> Manifest:
        documents = [Document(user, f"The kitchen of {user} is painted in heliotrope.") for user in users]
        corpus = write_corpus(self._folder / "corpus.jsonl", documents)
        options = TrainingOptions(part_kind="text", text=128)
        return run_training(plan(Corpus(corpus), self.directory, parts=2, options=options)).manifest


def test_texts_are_written_without_a_cluster(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ray_session, "connected")
    assert len(room.train("ada").parts) == 2


def test_an_unexpected_error_of_a_text_shows_nothing_of_it(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> dict[str, bytes]:
        raise KeyError("ada's words")

    monkeypatch.setattr(part_text, "text_files", failing)
    with pytest.raises(WorkError, match=r"^part-000: failed \(KeyError\)$"):
        room.train("ada")


def test_another_salt_stops_the_training(room: Room) -> None:
    room.train("ada")
    (room.directory / SALT_FILE).write_bytes(bytes(32))
    with pytest.raises(InputError, match="was trained with another salt"):
        room.train("ada")
