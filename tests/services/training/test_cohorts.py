"""Claim: no user is in two ensembles of a cohort, and a manifest records which ensembles were kept apart."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from privmix.engine import part_text
from privmix.foundation import ray_session
from privmix.foundation.errors import InputError, WorkError
from privmix.privacy.protocols.dp_sgd import DpSgdEvent
from privmix.training.cohorts import EarlierEnsembles, not_apart
from privmix.training.corpus import Corpus, Document
from privmix.training.directory import SALT
from privmix.training.manifest import Apart, Manifest, Part, PrivateBase, PrivateTraining
from privmix.training.marks import FILE as MARKS
from privmix.training.marks import NEXT, Marks
from privmix.training.options import TrainingOptions
from privmix.training.partition import read_salt, salt_id
from privmix.training.plan import run_training
from privmix.training.reading import read
from privmix.training.train import plan
from tests.support.manifests import adapter, manifest
from tests.support.training import write_corpus

SALTS = {"first": bytes(range(32)), "second": bytes(32)}
USERS = {"first": ("ada", "bob"), "second": ("cleo",)}


def ensemble(name: str, salt: bytes = b"", marks: str = "1" * 64, apart_from: Sequence[Manifest] = ()) -> Manifest:
    part = Part(index=0, **dict(adapter("part-000")))
    disjoint_from = tuple(Apart(ensemble=other.ensemble, marks=other.marks or "") for other in apart_from)
    return manifest(part, ensemble=name, salt_id=salt_id(salt), marks=marks, disjoint_from=disjoint_from)


@pytest.fixture
def earlier(tmp_path: Path) -> list[Path]:
    """Two ensembles with different salts."""
    for name, salt in SALTS.items():
        directory = tmp_path / name
        directory.mkdir()
        (directory / SALT).write_bytes(salt)
        marks = Marks(salt)
        list(marks.of(Document(user, f"A text of {user}.") for user in USERS[name]))
        with marks.saving(directory):
            ensemble(name, salt, marks.digest).save(directory)
    return [tmp_path / name for name in SALTS]


def test_documents_of_users_of_any_earlier_ensemble_are_left_out(earlier: list[Path], tmp_path: Path) -> None:
    documents = [Document(user, f"Another text of {user}.") for user in ("ada", "dora", "cleo", "dora", "bob")]
    corpus = Corpus(write_corpus(tmp_path / "corpus.jsonl", documents))
    text = read(corpus, SALTS["first"], list, EarlierEnsembles(earlier))
    assert [document.user for document in text.content] == ["dora", "dora"]
    assert text.left_out == 3
    assert text.marks.has_user(documents[1])
    assert not text.marks.has_user(documents[0])
    whole = read(corpus, SALTS["first"], list)
    assert (whole.content, whole.left_out) == (documents, 0)
    corpus = Corpus(write_corpus(tmp_path / "corpus.jsonl", documents[:1]))
    with pytest.raises(InputError, match="has no documents of users who are in no earlier ensemble"):
        read(corpus, SALTS["first"], list, EarlierEnsembles(earlier))


def test_users_that_cannot_be_recognised_stop_the_training(earlier: list[Path]) -> None:
    (earlier[1] / SALT).unlink()
    with pytest.raises(InputError, match=f"earlier {earlier[1]}: has no {SALT}"):
        EarlierEnsembles(earlier)


def test_each_pair_of_a_cohort_must_be_recorded_in_one_of_the_two() -> None:
    first = ensemble("a")
    second = ensemble("b", apart_from=[first])
    assert not_apart({"first": first, "second": second}) is None
    assert not_apart({"second": second, "first": first}) is None
    third = ensemble("c", apart_from=[second])
    assert not_apart({"first": first, "second": second, "third": third}) == ("first", "third")
    assert not_apart({"first": first, "second": second, "third": ensemble("c", apart_from=[first, second])}) is None


def test_a_user_of_the_base_of_one_cohort_is_in_no_other() -> None:
    """Everybody's text trained the base of A; C, of users who are in no part of A, would cost them a second epsilon."""
    digest = "2" * 64
    event = DpSgdEvent("user", 4.0, 1.0, 12)
    training = PrivateTraining(clipping="alone", epsilon=4, delta=1e-5, clip=1, blocks=4, event=event)
    base = PrivateBase(ensemble="base", origin=digest, adapter=digest, marks=digest, training=training)
    others = base.model_copy(update={"ensemble": "another base"})
    of_base = Apart(ensemble=base.ensemble, marks=base.marks)

    def on(of: PrivateBase | None, ensemble: Manifest, *more: Apart) -> Manifest:
        records = (*ensemble.disjoint_from, *more)
        return ensemble.model_copy(update={"private_base": of, "disjoint_from": records})

    a = ensemble("a")
    c = ensemble("c", apart_from=[a])
    for first, second, are_apart in (
        (on(base, a), c, False),
        (on(base, a), on(None, c, of_base), True),
        (on(base, a), on(base, c), True),
        (on(base, a), on(others, c), False),
        (on(base, a), on(others, c, of_base), False),
        (a, on(base, c), False),
        (on(None, a, of_base), on(base, c), True),
    ):
        assert (not_apart({"a": first, "c": second}) is None) == are_apart


@pytest.fixture
def room(tmp_path: Path) -> "Room":
    return Room(tmp_path)


class Room:
    """Holds ensembles of texts, which are made in an instant, in directories with the names of the ensembles."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def directory(self, name: str) -> Path:
        return self._folder / name

    def train(self, name: str, *users: str, earlier: Sequence[str] = ()) -> Manifest:
        documents = [Document(user, f"The kitchen of {user} is painted in heliotrope.") for user in users]
        corpus = write_corpus(self._folder / "corpus.jsonl", documents)
        options = TrainingOptions(part_kind="text", text=128)
        directories = [self.directory(other) for other in earlier]
        return run_training(
            plan(Corpus(corpus), self.directory(name), parts=2, options=options, earlier=directories)
        ).manifest


def test_texts_are_written_without_a_cluster(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ray_session, "connected")
    assert len(room.train("a", "ada").parts) == 2


def test_an_unexpected_error_of_a_text_shows_nothing_of_it(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> dict[str, bytes]:
        raise KeyError("ada's words")

    monkeypatch.setattr(part_text, "text_files", failing)
    with pytest.raises(WorkError, match=r"^part-000: failed \(KeyError\)$"):
        room.train("a", "ada")


def test_a_user_that_joins_the_earlier_cohort_ends_the_certificate(room: Room) -> None:
    """A trained, B trained apart from A, A trained again in place with a user of B: the user has two epsilons."""
    a, b = room.train("a", "ada"), room.train("b", "bob", earlier=["a"])
    assert not_apart({"a": a, "b": b}) is None
    again = room.train("a", "ada", "bob")
    assert again.ensemble == a.ensemble
    assert not_apart({"a": again, "b": b}) == ("a", "b")


def test_a_user_whose_text_was_removed_still_belongs_to_the_cohort(room: Room) -> None:
    """C is served with a user and trained again without: what it released about the user stays charged."""
    room.train("c", "ada", "bob")
    room.train("c", "ada")
    with pytest.raises(InputError, match="has no documents of users who are in no earlier ensemble"):
        room.train("d", "bob", earlier=["c"])


@pytest.mark.slow
def test_cohorts_that_are_trained_again_stay_apart_if_they_are_checked_again(room: Room) -> None:
    a, b = room.train("a", "ada"), room.train("b", "bob", earlier=["a"])
    a = room.train("a", "ada", "anna", earlier=["b"])
    assert not_apart({"a": a, "b": b}) is None
    with pytest.raises(InputError, match="name that ensemble's directory, too"):
        room.train("a", "ada", "anna", "bob")
    assert Manifest.load(room.directory("a")) == a
    assert room.train("a", "ada") == a.model_copy(update={"parts": Manifest.load(room.directory("a")).parts})


@pytest.mark.slow
def test_users_of_an_earlier_training_cannot_be_certified_afterwards(room: Room) -> None:
    room.train("a", "ada", "bob")
    room.train("b", "bob")
    room.train("a", "ada")  # bob is in b, and the marks of a do not tell who he is
    with pytest.raises(InputError, match="users of that text may be in both"):
        room.train("a", "ada", earlier=["b"])


@pytest.mark.slow
def test_marks_that_were_lost_or_rolled_back_stop_the_training(room: Room) -> None:
    room.train("c", "ada")
    marks = room.directory("c") / MARKS
    before = marks.read_bytes()
    room.train("c", "ada", "bob")
    marks.write_bytes(before)
    for name, options in (("c", {}), ("d", {"earlier": ["c"]})):
        with pytest.raises(InputError, match="is not the file of the last training"):
            room.train(name, "bob", **options)
    marks.unlink()
    with pytest.raises(InputError, match="has no marks of its corpus"):
        room.train("c", "ada")


@pytest.mark.parametrize("crash", [(Path, "replace"), (Manifest, "save")], ids=["after", "before"])
def test_a_crash_around_the_manifest_loses_no_mark_and_the_next_training_continues(
    room: Room, monkeypatch: pytest.MonkeyPatch, crash: tuple[type, str]
) -> None:
    """Before, the marks of the new text were in place and the manifest named the old ones: every training stopped."""
    room.train("c", "ada")
    owner, name = crash
    real = getattr(owner, name)

    def killed(self: object, target: Path) -> None:
        if owner is Manifest or target.name == MARKS:
            raise KeyboardInterrupt
        real(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            room.train("c", "ada", "bob")
    directory, salt = room.directory("c"), read_salt(room.directory("c") / SALT)
    assert Marks.of_ensemble(directory, salt).has_user(Document("bob", "")) == (owner is Path)
    room.train("c", "ada")
    assert not (directory / NEXT).exists()
    assert Manifest.load(directory).marks == hashlib.sha256((directory / MARKS).read_bytes()).hexdigest()
    assert Marks.of_ensemble(directory, salt).has_user(Document("bob", "")) == (owner is Path), "released or not"


@pytest.mark.slow
def test_another_salt_stops_the_training(room: Room) -> None:
    room.train("c", "ada")
    (room.directory("c") / SALT).write_bytes(bytes(32))
    with pytest.raises(InputError, match="was trained with another salt"):
        room.train("c", "ada")
