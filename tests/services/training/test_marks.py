"""Claim: any user or text of a private corpus is recognized, and without the salt nobody can test a guess."""

import hashlib
import stat
from pathlib import Path

import pytest

from privmix.engine import part_text
from privmix.foundation import ray_session
from privmix.foundation.errors import InputError, WorkError
from privmix.training.corpus import Corpus, Document
from privmix.training.directory import SALT as SALT_FILE
from privmix.training.manifest import Manifest
from privmix.training.marks import FILE, NEXT, CorpusOverlap, Marks
from privmix.training.options import TrainingOptions
from privmix.training.partition import read_salt
from privmix.training.plan import run_training
from privmix.training.train import plan
from tests.support.training import write_corpus

SALT = bytes(range(32))
PRIVATE = [Document("ada", "The ferry leaves at nine."), Document("bob", "Nobody waits for it.")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    marks = Marks(SALT)
    assert list(marks.of(PRIVATE)) == PRIVATE
    with marks.saving(tmp_path):
        pass
    return tmp_path


@pytest.mark.parametrize(
    ("document", "overlap"),
    [
        (Document("cleo", "A text of her own."), CorpusOverlap(0, 0)),
        (Document("ada", "A text of her own."), CorpusOverlap(1, 0)),
        (Document("cleo", "The ferry leaves at nine.\n"), CorpusOverlap(0, 1)),
        (Document("The ferry leaves at nine.", "ada"), CorpusOverlap(0, 0)),
    ],
)
def test_a_user_or_a_text_is_recognised(directory: Path, document: Document, overlap: CorpusOverlap) -> None:
    measured = Marks.load(directory, SALT).overlap([document])
    assert measured == overlap
    assert bool(measured) == (overlap != CorpusOverlap(0, 0))


def test_another_salt_recognises_nothing(directory: Path) -> None:
    assert not Marks.load(directory, bytes(32)).overlap(PRIVATE)


def test_only_the_owner_can_read_the_file_and_its_order_is_not_the_corpus_order(
    directory: Path, tmp_path: Path
) -> None:
    assert stat.S_IMODE((directory / FILE).stat().st_mode) == 0o600
    other = tmp_path / "other"
    other.mkdir()
    marks = Marks(SALT)
    list(marks.of(reversed(PRIVATE)))
    with marks.saving(other):
        pass
    assert (other / FILE).read_bytes() == (directory / FILE).read_bytes()
    assert b"ferry" not in (directory / FILE).read_bytes()


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

    def knows(self, user: str) -> bool:
        marks = Marks.of_ensemble(self.directory, read_salt(self.directory / SALT_FILE))
        return bool(marks.overlap([Document(user, "")]))


def test_texts_are_written_without_a_cluster(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ray_session, "connected")
    assert len(room.train("ada").parts) == 2


def test_an_unexpected_error_of_a_text_shows_nothing_of_it(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> dict[str, bytes]:
        raise KeyError("ada's words")

    monkeypatch.setattr(part_text, "text_files", failing)
    with pytest.raises(WorkError, match=r"^part-000: failed \(KeyError\)$"):
        room.train("ada")


def test_marks_that_were_lost_or_rolled_back_stop_the_training(room: Room) -> None:
    room.train("ada")
    marks = room.directory / FILE
    before = marks.read_bytes()
    room.train("ada", "bob")
    marks.write_bytes(before)
    with pytest.raises(InputError, match="is not the file of the last training"):
        room.train("bob")
    marks.unlink()
    with pytest.raises(InputError, match="has no marks of its corpus"):
        room.train("ada")


@pytest.mark.parametrize("crash", [(Path, "replace"), (Manifest, "save")], ids=["after", "before"])
def test_a_crash_around_the_manifest_loses_no_mark_and_the_next_training_continues(
    room: Room, monkeypatch: pytest.MonkeyPatch, crash: tuple[type, str]
) -> None:
    """Before, the marks of the new text were in place and the manifest named the old ones: every training stopped."""
    room.train("ada")
    owner, name = crash
    real = getattr(owner, name)

    def killed(self: object, target: Path) -> None:
        if owner is Manifest or target.name == FILE:
            raise KeyboardInterrupt
        real(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            room.train("ada", "bob")
    assert room.knows("bob") == (owner is Path)
    room.train("ada")
    assert not (room.directory / NEXT).exists()
    assert Manifest.load(room.directory).marks == hashlib.sha256((room.directory / FILE).read_bytes()).hexdigest()
    assert room.knows("bob") == (owner is Path), "released or not"


@pytest.mark.slow
def test_another_salt_stops_the_training(room: Room) -> None:
    room.train("ada")
    (room.directory / SALT_FILE).write_bytes(bytes(32))
    with pytest.raises(InputError, match="was trained with another salt"):
        room.train("ada")
