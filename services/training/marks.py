"""By what a private corpus is recognised: a keyed hash of every user's id and of every text.

`privmix tune` must never be run on the text that is to be protected, and asks these. Without the key, the salt of the
partition, nobody can test a guess; with it, anyone can, so the file belongs where the salt does.
"""

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from services.files import write_atomically
from services.training.corpus import Document

FILE = "corpus.marks"
_TYPE = np.dtype("<u8")


@dataclass(frozen=True)
class Overlap:
    """How many users, and how many texts, of other documents are in a corpus too."""

    users: int
    texts: int

    def __bool__(self) -> bool:
        return bool(self.users or self.texts)


class Marks:
    """The marks of the documents that went through `of`, or that a file holds."""

    def __init__(self, salt: bytes, marks: Iterable[int] = ()) -> None:
        self._key = hashlib.sha256(b"privmix corpus marks\0" + salt).digest()
        self._marks = set(marks)

    @classmethod
    def load(cls, directory: Path, salt: bytes) -> Self:
        """Those of the corpus that the ensemble in a directory was trained on, under the salt of its partition.

        Raises:
            OSError: there are none.
        """
        return cls(salt, np.frombuffer((directory / FILE).read_bytes(), _TYPE).tolist())

    def of(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents, marked as they are read."""
        for document in documents:
            self._marks |= {self._user(document), self._text(document)}
            yield document

    def overlap(self, documents: Iterable[Document]) -> Overlap:
        """What of these documents is marked."""
        users = {document.user for document in documents if self._user(document) in self._marks}
        texts = sum(self._text(document) in self._marks for document in documents)
        return Overlap(len(users), texts)

    def save(self, directory: Path) -> None:
        """Write them, in no order that would tell about the corpus, readable by their owner alone."""
        marks: NDArray[np.uint64] = np.array(sorted(self._marks), dtype=_TYPE)
        write_atomically(directory / FILE, marks.tobytes())
        (directory / FILE).chmod(0o600)

    def _user(self, document: Document) -> int:
        return self._mark(b"user\0" + document.user.encode())

    def _text(self, document: Document) -> int:
        return self._mark(b"text\0" + document.text.strip().encode())

    def _mark(self, content: bytes) -> int:
        return int.from_bytes(hmac.digest(self._key, content, "sha256")[: _TYPE.itemsize], "little")
