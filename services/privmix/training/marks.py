"""Marks a private corpus with keyed hashes of its user ids and texts, so that it can be recognised later.

An ensemble keeps the marks of all its trainings, because what it released about a user stays released after the user's
text is removed. The key derives from the partition's salt. Only with the salt can a guess be tested, so keep the file
as secret as the salt.
"""

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from privmix.foundation.errors import InputError
from privmix.foundation.files import sha256, sync_directory, write_atomically
from privmix.training.corpus import Document
from privmix.training.manifest import FILE as MANIFEST
from privmix.training.manifest import Manifest
from privmix.training.partition import salt_id

FILE = "corpus.marks"
NEXT = "corpus.marks.next"
_TYPE = np.dtype("<u8")


def marks_file(directory: Path) -> Path:
    """Returns the file of the marks that the manifest names, also if a crash kept it from getting its final name."""
    unnamed = directory / NEXT
    if unnamed.exists() and (directory / MANIFEST).exists() and Manifest.load(directory).marks == sha256(unnamed):
        return unnamed
    return directory / FILE


@dataclass(frozen=True)
class CorpusOverlap:
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
    def of_ensemble(cls, directory: Path, salt: bytes) -> Self:
        """Returns the marks to which the next training of the ensemble in a directory adds; none for a new ensemble.

        Raises:
            InputError: the ensemble was trained with another salt, or its marks are missing or are not its last ones.
        """
        if not (directory / MANIFEST).exists():
            return cls(salt)
        manifest = Manifest.load(directory)
        if manifest.salt_id != salt_id(salt):
            raise InputError(
                f"salt: {directory} was trained with another salt, without which its users cannot be recognised; "
                "restore the salt, or train into another directory"
            )
        if manifest.marks is None and not (directory / FILE).exists():
            return cls(salt)
        marks = cls.load(directory, salt)
        if manifest.marks not in (None, marks.digest):
            raise InputError(
                f"{directory / FILE}: is not the file of the last training, so users of the ensemble may be missing; "
                "restore it, or train into another directory"
            )
        return marks

    @classmethod
    def load(cls, directory: Path, salt: bytes) -> Self:
        """Loads the marks of the corpus on which the ensemble in a directory was trained.

        Args:
            salt: the salt of the ensemble's partition.

        Raises:
            InputError: the ensemble has no marks.
        """
        try:
            return cls(salt, np.frombuffer(marks_file(directory).read_bytes(), _TYPE).tolist())
        except OSError as error:
            raise InputError(
                f"{directory}: has no marks of its corpus ({FILE}); restore them, or train into another directory"
            ) from error

    def of(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields the documents and marks them."""
        for document in documents:
            self._marks |= {self._user(document), self._text(document)}
            yield document

    def overlap(self, documents: Iterable[Document]) -> CorpusOverlap:
        """Counts the users and texts of these documents that are marked."""
        users = {document.user for document in documents if self._user(document) in self._marks}
        texts = sum(self._text(document) in self._marks for document in documents)
        return CorpusOverlap(len(users), texts)

    @property
    def digest(self) -> str:
        """The SHA-256 of the file that `save` writes."""
        return hashlib.sha256(self._content).hexdigest()

    def __or__(self, other: "Marks") -> "Marks":
        """Returns the marks of both, which must have the same salt."""
        both = copy(self)
        both._marks = self._marks | other._marks
        return both

    @contextmanager
    def saving(self, directory: Path) -> Iterator[None]:
        """Writes the marks, sorted so that their order reveals nothing, to a file that only its owner can read.

        The block writes the manifest that names them. A crash at any moment leaves a manifest with its marks: before
        the manifest the former file is in place, and after it `marks_file` finds the new one.
        """
        write_atomically(directory / NEXT, self._content, private=True)
        yield
        (directory / NEXT).replace(directory / FILE)
        sync_directory(directory)

    @property
    def _content(self) -> bytes:
        marks: NDArray[np.uint64] = np.array(sorted(self._marks), dtype=_TYPE)
        return marks.tobytes()

    def _user(self, document: Document) -> int:
        return self._mark(b"user\0" + document.user.encode())

    def _text(self, document: Document) -> int:
        return self._mark(b"text\0" + document.text.strip().encode())

    def _mark(self, content: bytes) -> int:
        return int.from_bytes(hmac.digest(self._key, content, "sha256")[: _TYPE.itemsize], "little")
