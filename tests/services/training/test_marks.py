"""Claim: any user or text of a private corpus is recognized, and without the salt nobody can test a guess."""

import stat
from pathlib import Path

import pytest

from privmix.training.corpus import Document
from privmix.training.marks import FILE, CorpusOverlap, Marks

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
