"""Claim: an ensemble of texts needs no cluster, an error shows nothing of a text, and a salt is kept."""

from collections.abc import Callable
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
def train(tmp_path: Path) -> Callable[[], Manifest]:
    """Makes an ensemble of texts, in an instant."""
    documents = [Document("ada", "The kitchen of ada is painted in heliotrope.")]
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    options = TrainingOptions(part_kind="text", text=128)
    return lambda: run_training(plan(Corpus(corpus), tmp_path / "ensemble", parts=2, options=options)).manifest


def test_texts_are_written_without_a_cluster(train: Callable[[], Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ray_session, "connected")
    assert len(train().parts) == 2


def test_an_unexpected_error_of_a_text_shows_nothing_of_it(
    train: Callable[[], Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> dict[str, bytes]:
        raise KeyError("ada's words")

    monkeypatch.setattr(part_text, "text_files", failing)
    with pytest.raises(WorkError, match=r"^part-000: failed \(KeyError\)$"):
        train()


def test_another_salt_stops_the_training(train: Callable[[], Manifest], tmp_path: Path) -> None:
    train()
    (tmp_path / "ensemble" / SALT_FILE).write_bytes(bytes(32))
    with pytest.raises(InputError, match="was trained with another salt"):
        train()
