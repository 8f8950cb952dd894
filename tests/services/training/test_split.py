"""Claim: a split assigns users, and depends on their ids alone."""

import json
from pathlib import Path

import pytest

from privmix.foundation.errors import InputError
from privmix.training.corpus import Corpus
from privmix.training.partition import part_of
from privmix.training.split import Side, held_out, split

SALT = bytes(range(32))


def corpus(path: Path, users: int = 200, documents: int = 3) -> Corpus:
    lines = [{"user": f"user-{u}", "text": f"{d} of {u}: " + "x" * 50} for d in range(documents) for u in range(users)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Corpus(path)


def cut(folder: Path, corpus: Corpus, **options: object) -> tuple[Side, Side]:
    given = {"fraction": 0.2, "salt_file": folder / "salt", **options}
    return split(corpus, folder / "train.jsonl", folder / "heldout.jsonl", **given)  # type: ignore[arg-type]


def test_all_documents_of_a_user_are_on_one_side(tmp_path: Path) -> None:
    training, held = cut(tmp_path, corpus(tmp_path / "corpus.jsonl"))
    train, apart = ([*Corpus(tmp_path / name)] for name in ("train.jsonl", "heldout.jsonl"))
    assert not {document.user for document in train} & {document.user for document in apart}
    assert all((tmp_path / name).stat().st_mode & 0o777 == 0o600 for name in ("train.jsonl", "heldout.jsonl", "salt"))
    assert sorted(map(repr, [*train, *apart])) == sorted(map(repr, Corpus(tmp_path / "corpus.jsonl")))
    assert (training.documents, held.documents) == (len(train), len(apart))
    assert len(training.users) + len(held.users) == 200
    assert 15 < len(held.users) < 70


def test_the_same_salt_makes_the_same_split(tmp_path: Path) -> None:
    whole = corpus(tmp_path / "corpus.jsonl")
    cut(tmp_path, whole)
    before = (tmp_path / "heldout.jsonl").read_bytes()
    cut(tmp_path, whole)
    assert (tmp_path / "heldout.jsonl").read_bytes() == before
    (tmp_path / "salt").unlink()
    cut(tmp_path, whole)
    assert (tmp_path / "heldout.jsonl").read_bytes() != before


def test_a_split_is_independent_of_parts() -> None:
    users = [f"user-{number}" for number in range(20_000)]
    apart = [user for user in users if held_out(user, SALT, 0.1)]
    assert 1700 < len(apart) < 2300
    assert 850 < sum(part_of(user, SALT, 2) for user in apart) < 1150


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"fraction": 0.0}, "held-out: must lie between 0 and 1"),
        ({"fraction": 1e-9}, "leaves no user on the held-out side"),
    ],
)
def test_impossible_splits(tmp_path: Path, options: dict[str, object], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        cut(tmp_path, corpus(tmp_path / "corpus.jsonl"), **options)
    assert not (tmp_path / "train.jsonl").exists()
