"""Claim: no user is in two ensembles of a cohort, and a manifest records which ensembles were kept apart."""

from pathlib import Path

import pytest

from services.errors import InputError
from services.training.cohorts import OtherUsers, not_apart
from services.training.corpus import Document
from services.training.directory import SALT
from services.training.manifest import Adapter, Manifest, Part
from services.training.marks import Marks

SALTS = {"first": bytes(range(32)), "second": bytes(32)}
USERS = {"first": ("ada", "bob"), "second": ("cleo",)}


def manifest(name: str, *disjoint_from: str) -> Manifest:
    digest = "0" * 64
    adapter = Adapter(name="part-000", path="parts/part-000", sha256=digest, size_bucket=0)
    return Manifest(
        ensemble=name,
        base_model="m",
        base_revision=digest,
        tokenizer=digest,
        salt_id="s",
        rank=4,
        attention="public",
        parts=(Part(index=0, **dict(adapter)),),
        disjoint_from=disjoint_from,
    )


@pytest.fixture
def earlier(tmp_path: Path) -> list[Path]:
    """Two ensembles with different salts."""
    for name, salt in SALTS.items():
        directory = tmp_path / name
        directory.mkdir()
        (directory / SALT).write_bytes(salt)
        marks = Marks(salt)
        list(marks.of(Document(user, f"A text of {user}.") for user in USERS[name]))
        marks.save(directory)
        manifest(name).save(directory)
    return [tmp_path / name for name in SALTS]


def test_documents_of_users_of_any_earlier_ensemble_are_left_out(earlier: list[Path]) -> None:
    documents = [Document(user, f"Another text of {user}.") for user in ("ada", "dora", "cleo", "dora", "bob")]
    others = OtherUsers(documents, earlier)
    assert [document.user for document in others] == ["dora", "dora"]
    assert others.left_out == 3
    assert [document.user for document in others] == ["dora", "dora"], "a corpus is read several times"
    assert others.left_out == 3
    assert others.ensembles == ("first", "second")
    assert list(OtherUsers(documents)) == documents


def test_users_that_cannot_be_recognised_stop_the_training(earlier: list[Path]) -> None:
    (earlier[1] / SALT).unlink()
    with pytest.raises(InputError, match=f"earlier {earlier[1]}: has no {SALT}"):
        OtherUsers([], earlier)


def test_each_pair_of_a_cohort_must_be_recorded_in_one_of_the_two() -> None:
    first, second = manifest("a"), manifest("b", "a")
    assert not_apart({"first": first, "second": second}) is None
    assert not_apart({"second": second, "first": first}) is None
    third = manifest("c", "b")
    assert not_apart({"first": first, "second": second, "third": third}) == ("first", "third")
    assert not_apart({"first": first, "second": second, "third": manifest("c", "a", "b")}) is None
