"""Reads a corpus once, as it streams by, and returns what is known of it only afterwards."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from privmix.training.cohorts import EarlierEnsembles
from privmix.training.corpus import Corpus, Document
from privmix.training.marks import Marks

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class CorpusRead(Generic[T]):
    """Holds what a corpus was read into.

    Attributes:
        marks: the marks of the documents.
        skipped: the numbers of skipped rows by kind, which are private.
        left_out: the number of documents whose users are in earlier ensembles.
    """

    content: T
    marks: Marks
    skipped: Mapping[str, int]
    left_out: int


def read(
    corpus: Corpus, salt: bytes, into: Callable[[Iterable[Document]], T], earlier: EarlierEnsembles | None = None
) -> CorpusRead[T]:
    """Reads the documents of a corpus whose users are in no earlier ensemble.

    Args:
        salt: the salt of the partition, for the marks.
        into: takes all documents, one after another.

    Raises:
        CorpusError: there are no such documents, or the corpus cannot be read.
    """
    marks, counts = Marks(salt), {"read": 0, "left out": 0}

    def documents() -> Iterator[Document]:
        for document in corpus:
            is_left_out = earlier is not None and earlier.have_user(document)
            counts["left out" if is_left_out else "read"] += 1
            if not is_left_out:
                yield document

    content = into(marks.of(documents()))
    if not counts["read"]:
        raise corpus.empty(" of users who are in no earlier ensemble" if counts["left out"] else "")
    return CorpusRead(content, marks, dict(corpus.skipped), counts["left out"])
