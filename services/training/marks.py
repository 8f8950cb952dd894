"""Marks a private corpus with keyed hashes of its user ids and texts, so that it can be recognised later.

`privmix tune` must never run on the text to be protected, and checks these marks. The key derives from the partition's
salt. Only with the salt can a guess be tested, so keep the file as secret as the salt.
"""

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from services.errors import InputError
from services.files import write_atomically
from services.training.corpus import Document

FILE = "corpus.marks"
_TYPE = np.dtype("<u8")


@dataclass(frozen=True)
class Overlap:
    """Counts the users and the texts that other documents share with a corpus."""

    users: int
    texts: int

    def __bool__(self) -> bool:
        return bool(self.users or self.texts)


class Marks:
    """Holds the marks of the documents that passed through `of` or were loaded from a file."""

    def __init__(self, salt: bytes, marks: Iterable[int] = ()) -> None:
        self._key = hashlib.sha256(b"privmix corpus marks\0" + salt).digest()
        self._marks = set(marks)

    @classmethod
    def load(cls, directory: Path, salt: bytes) -> Self:
        """Loads the marks of the corpus on which the ensemble in a directory was trained.

        Args:
            salt: the salt of the ensemble's partition.

        Raises:
            InputError: the ensemble has no marks.
        """
        try:
            return cls(salt, np.frombuffer((directory / FILE).read_bytes(), _TYPE).tolist())
        except OSError as error:
            raise InputError(
                f"{directory}: has no marks of its corpus; run its training again, which keeps finished adapters"
            ) from error

    def of(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields the documents and marks them."""
        for document in documents:
            self._marks |= {self._user(document), self._text(document)}
            yield document

    def overlap(self, documents: Iterable[Document]) -> Overlap:
        """Counts the users and texts of these documents that are marked."""
        users = {document.user for document in documents if self._user(document) in self._marks}
        texts = sum(self._text(document) in self._marks for document in documents)
        return Overlap(len(users), texts)

    def has_user(self, document: Document) -> bool:
        """Returns whether a marked document has the same user."""
        return self._user(document) in self._marks

    def save(self, directory: Path) -> None:
        """Writes the marks, sorted so that their order reveals nothing, to a file that only its owner can read."""
        marks: NDArray[np.uint64] = np.array(sorted(self._marks), dtype=_TYPE)
        write_atomically(directory / FILE, marks.tobytes())
        (directory / FILE).chmod(0o600)

    def _user(self, document: Document) -> int:
        return self._mark(b"user\0" + document.user.encode())

    def _text(self, document: Document) -> int:
        return self._mark(b"text\0" + document.text.strip().encode())

    def _mark(self, content: bytes) -> int:
        return int.from_bytes(hmac.digest(self._key, content, "sha256")[: _TYPE.itemsize], "little")
