"""Keeps cohorts apart: ensembles of different users, who therefore have the epsilon of one ensemble and not the sum.

A person is in at most one cohort. So their text changes the answers of one ensemble alone, whatever clients ask the
others, and the loss is that of their own cohort (parallel composition). Manifests record which ensembles were kept
apart, so that a service can check it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from services.errors import InputError
from services.training.corpus import Document
from services.training.directory import SALT
from services.training.manifest import Manifest
from services.training.marks import Marks
from services.training.partition import read_salt


class OtherUsers:
    """Yields the documents whose users are in none of the earlier ensembles.

    Attributes:
        ensembles: the ids of the earlier ensembles.
        left_out: the number of documents left out so far.

    Raises:
        InputError: an earlier ensemble has no manifest, marks or salt.
    """

    def __init__(self, documents: Iterable[Document], earlier: Sequence[Path] = ()) -> None:
        self._documents = documents
        self._marks = [_marks(directory) for directory in earlier]
        self.ensembles = tuple(Manifest.load(directory).ensemble for directory in earlier)
        self.left_out = 0

    def __iter__(self) -> Iterator[Document]:
        self.left_out = 0
        for document in self._documents:
            if any(marks.has_user(document) for marks in self._marks):
                self.left_out += 1
            else:
                yield document


def _marks(directory: Path) -> Marks:
    if not (directory / SALT).exists():
        raise InputError(
            f"earlier {directory}: has no {SALT}, without which its users cannot be recognised; copy it there"
        )
    return Marks.load(directory, read_salt(directory / SALT))


def not_apart(manifests: Mapping[str, Manifest]) -> tuple[str, str] | None:
    """Returns the names of two ensembles that may share users, as their manifests record; None if all are apart."""
    for (name, first), (other, second) in combinations(manifests.items(), 2):
        if second.ensemble not in first.disjoint_from and first.ensemble not in second.disjoint_from:
            return name, other
    return None
