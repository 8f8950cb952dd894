"""Writes files and directories atomically, loads JSON Lines, and computes hashes of files."""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from privmix.foundation.errors import InputError, WorkError


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal. Reads it once per process while its size and time do not change."""
    stat = path.stat()
    return _sha256(path.resolve(), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4096)
def _sha256(path: Path, size: int, mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_files(directory: Path, names: Iterable[str]) -> str:
    """Returns one SHA-256 of the names and the contents of files, in the order of the names."""
    listing = "".join(f"{sha256(directory / name)}  {name}\n" for name in sorted(names))
    return hashlib.sha256(listing.encode()).hexdigest()


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Replaces a file in one step: after a crash, and at any time, readers see the old content or the new one.

    Args:
        private: only the owner may read the file. Others follow the process's umask.
    """
    with replacing(path, private=private) as file:
        file.write(content)


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Yields a file that replaces another one in one step at the end of the block, or vanishes if the block fails."""
    with _temporary(path, private) as (temporary, file):
        yield file
        _sync(file)
        temporary.replace(path)
    sync_directory(path.parent)


def create_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Creates a file with its whole content in one step.

    Raises:
        FileExistsError: there is a file already, which stays.
    """
    with _temporary(path, private) as (temporary, file):
        file.write(content)
        _sync(file)
        os.link(temporary, path)  # unlike a rename, it never replaces a file
    sync_directory(path.parent)


@contextmanager
def _temporary(path: Path, private: bool) -> Iterator[tuple[Path, BinaryIO]]:
    """Yields a new file beside a path, which is removed unless the block renames it. The kernel applies the umask."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if private else 0o666)
    try:
        with _naming(path), os.fdopen(descriptor, "w+b") as file:
            yield temporary, file
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Names a path in an error of writing, such as that of a full disk, which has no name of its own."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def locked(path: Path, patience_s: float = 10.0) -> Iterator[None]:
    """Excludes other holders of the lock of a file, which the block may replace. The lock ends with its process.

    Raises:
        TimeoutError: another process kept the lock for `patience_s`.
        OSError: the file is missing, or its directory cannot be written.
    """
    path.stat()  # filelock would make a directory that is gone
    with FileLock(path.with_name(f".{path.name}.lock"), patience_s, mode=0o666, poll_interval=0.005):
        yield


@contextmanager
def only_writer(output: Path, work: str) -> Iterator[None]:
    """Creates a directory, which this process alone writes until the block ends.

    Args:
        work: what is done there, such as "training".

    Raises:
        InputError: the directory cannot be created.
        WorkError: another process does the same work there.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {output}: cannot be created: {error.strerror}") from error
    try:
        with FileLock(output / f".{work}.lock", timeout=0):
            yield
    except Timeout as error:
        raise WorkError(f"output {output}: another {work} is writing to it; wait for it or stop it") from error


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes files by name into a directory, which is created if needed. Not atomic: see `building`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)


@contextmanager
def building(target: Path, *, private: bool = False) -> Iterator[Path]:
    """Yields a temporary directory, which replaces `target` at the end of the block, or is removed if the block fails.

    The caller must hold a lock that makes it the only builder of `target`.

    Args:
        private: only the owner may read what is in the directory.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = f".unfinished-{target.name}-"
    for leftover in target.parent.glob(f"{unfinished}*"):  # of killed builders
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = target.with_name(f"{unfinished}{secrets.token_hex(8)}")
    temporary.mkdir(0o700 if private else 0o777)
    try:
        with _naming(target):
            yield temporary
        _sync_tree(temporary)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        sync_directory(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Writes a directory to the disk, so that renames in it survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directory(directory)
