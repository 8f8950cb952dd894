"""Reads a corpus once, as it streams by, and returns what is known of it only afterwards."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from privmix.training.corpus import Corpus, Document
from privmix.training.marks import Marks

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class CorpusRead(Generic[T]):
    """Holds what a corpus was read into.

    Attributes:
        marks: the marks of the documents.
        skipped: the numbers of skipped rows by kind, which are private.
    """

    content: T
    marks: Marks
    skipped: Mapping[str, int]


def read(corpus: Corpus, salt: bytes, into: Callable[[Iterable[Document]], T]) -> CorpusRead[T]:
    """Reads the documents of a corpus.

    Args:
        salt: the salt of the partition, for the marks.
        into: takes all documents, one after another.

    Raises:
        CorpusError: there are no documents, or the corpus cannot be read.
    """
    marks, read = Marks(salt), 0

    def documents() -> Iterator[Document]:
        nonlocal read
        for document in corpus:
            read += 1
            yield document

    content = into(marks.of(documents()))
    if not read:
        raise corpus.empty()
    return CorpusRead(content, marks, dict(corpus.skipped))
