"""Stores the contents of files in a directory or an object store. The database has only their descriptions.

A content has the name of its file's id, in a folder with the id of the database: several services may share a place.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from privmix.foundation.errors import ConfigurationError, FilesUnavailable
from privmix.foundation.files import write_atomically


class Contents(ABC):
    """Stores contents by id. Every method raises FilesUnavailable if the place cannot be used now."""

    @abstractmethod
    def write(self, id_: str, content: bytes) -> None:
        """Stores a content durably, as a whole or not at all. Replaces an earlier one."""

    @abstractmethod
    def read(self, id_: str) -> bytes | None:
        """Returns a content; None if it is lost."""

    @abstractmethod
    def delete(self, id_: str) -> None:
        """Deletes a content, if it is there."""

    @abstractmethod
    def ids(self) -> set[str]:
        """Returns the names of all that is there, also of what a crash left half written."""


class DirectoryContents(Contents):
    """Stores contents in a directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with _explained(str(folder)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, "it is read-only")

    def write(self, id_: str, content: bytes) -> None:
        with _explained(str(self._folder)):
            write_atomically(self._folder / id_, content, private=True)

    def read(self, id_: str) -> bytes | None:
        with _explained(str(self._folder)):
            try:
                return (self._folder / id_).read_bytes()
            except FileNotFoundError:
                self._folder.stat()  # if the directory is missing too, its volume is, and the content is not lost
                return None

    def delete(self, id_: str) -> None:
        with _explained(str(self._folder)):
            (self._folder / id_).unlink(missing_ok=True)

    def ids(self) -> set[str]:
        with _explained(str(self._folder)):
            return {entry.name for entry in os.scandir(self._folder)}


class ObjectContents(Contents):
    """Stores contents as objects under a URL of fsspec, such as `s3://bucket/prefix`."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._url = url
        with _explained(url):
            self._files, self._prefix = url_to_fs(url, use_listings_cache=False)

    def write(self, id_: str, content: bytes) -> None:
        with _explained(self._url):
            self._files.pipe_file(f"{self._prefix}/{id_}", content)

    def read(self, id_: str) -> bytes | None:
        with _explained(self._url):
            try:
                content: Any = self._files.cat_file(f"{self._prefix}/{id_}")
            except FileNotFoundError:
                return None
            return bytes(content)

    def delete(self, id_: str) -> None:
        with _explained(self._url):
            try:
                self._files.rm_file(f"{self._prefix}/{id_}")
            except FileNotFoundError:
                return

    def ids(self) -> set[str]:
        with _explained(self._url):
            try:
                places = self._files.ls(self._prefix, detail=False)
            except FileNotFoundError:
                return set()
            return {str(place).rstrip("/").rpartition("/")[2] for place in places}


def contents_at(place: str, database: str) -> Contents:
    """Returns the contents of a database's files.

    Args:
        place: a directory, or an object store's URL of fsspec.
        database: the id of the database.

    Raises:
        FilesUnavailable: the place cannot be used.
    """
    if "://" not in place or place.startswith("file://"):
        return DirectoryContents(Path(place.removeprefix("file://")) / database)
    return ObjectContents(f"{place.rstrip('/')}/{database}")


def default_place(database: str) -> str:
    """Returns the default place of the files of a database: `files` in the directory of a SQLite file.

    Raises:
        ConfigurationError: the database is no file.
    """
    if "://" not in database:
        return str(Path(database).with_name("files"))
    if database.startswith("sqlite"):
        from sqlalchemy import make_url

        return str(Path(make_url(database).database or "").with_name("files"))
    raise ConfigurationError(
        "batches.files: the keys are in a database server, so say where the clients' files are: a directory on the "
        "head node, or the URL of an object store (s3://bucket/prefix); or set batches.enabled: false"
    )


@contextmanager
def _explained(place: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each file system of fsspec has errors of its own, which may quote a secret
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise FilesUnavailable(f"batches.files: {place} cannot be used now: {reason}") from error
