"""Reads JSON Lines as a stream: UTF-8, or UTF-16 with a byte order mark, without blank lines, in bounded memory.

    for number, row in read_lines(Path("rows.jsonl"), "an object"):
        row["text"]

Messages name the file and the line, and never quote the content, because it can be private.
"""

import codecs
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from privmix.foundation.errors import InputError
from privmix.foundation.files import replacing

LINE_LIMIT = 2**20
"""The most characters of a line."""

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(eq=False)
class BadRow(Exception):  # noqa: N818
    """Says what is wrong with a row and how to mend it, without its content."""

    problem: str
    fix: str
    field: str | None = None

    @property
    def kind(self) -> str:
        """The kind of the problem, by which skipped rows are counted."""
        return f"field {self.field!r}: {self.problem}" if self.field else self.problem


def as_text(file: BinaryIO) -> TextIO:
    """Returns the text of a file that can seek, in UTF-8 or, with a byte order mark, in UTF-16.

    Bytes that are not UTF-8 become surrogates. Lines end at line feeds alone.
    """
    mark = file.read(2)
    file.seek(0)
    if mark in _UTF_16:
        return io.TextIOWrapper(file, "utf-16", newline="\n")
    return io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="\n")


def lines(text: TextIO) -> Iterator[tuple[int, str | None]]:
    """Yields the number and the content, without line end, of each line that is not blank.

    The content is None for a line over the limit, which is never in memory as a whole.
    """
    number = 0
    while line := text.readline(LINE_LIMIT + 1):
        number += 1
        if len(line) > LINE_LIMIT and not line.endswith("\n"):
            while (rest := text.readline(LINE_LIMIT)) and not rest.endswith("\n"):
                pass
            yield number, None
        elif line.strip(" \t\r\n\ufeff"):
            yield number, line.rstrip("\r\n")


def parse(line: str | None) -> dict[str, Any]:
    """Returns the object of a line.

    Raises:
        BadRow: the line has none.
    """
    if line is None:
        raise too_long()
    try:
        line.encode()
        # Files that were put together have byte order marks inside.
        row = json.loads(line.removeprefix("\ufeff"), object_pairs_hook=_each_once)
    except UnicodeEncodeError:
        raise BadRow("is not UTF-8", "convert the file to UTF-8") from None
    except (ValueError, RecursionError):
        raise BadRow("is not JSON", "write one JSON object on each line") from None
    if not isinstance(row, dict):
        raise BadRow("is not a JSON object", "write one object on each line")
    return row


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        raise BadRow("has a key twice", "keep one of them")
    return keys


def too_long(field: str | None = None) -> BadRow:
    return BadRow(f"is longer than {LINE_LIMIT // 2**20} MiB", "split the text into several documents", field)


def read_lines(path: Path, expected: str, label: str = "") -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and the object of each line that is not blank.

    Args:
        expected: what errors say that a line must be.
        label: what errors say before the path.

    Raises:
        InputError: the file cannot be read, or a line is no object.
    """
    name = f"{label} {path}".strip()
    try:
        with path.open("rb") as file:
            for number, line in lines(as_text(file)):
                try:
                    yield number, parse(line)
                except BadRow as bad:
                    problem = f"must be {expected}" if bad.problem == "is not a JSON object" else bad.problem
                    raise InputError(f"{name}: line {number}: {problem}") from None
    except (OSError, UnicodeError) as error:
        raise InputError(f"{name}: cannot be read: {type(error).__name__}") from None


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]], *, private: bool = False) -> None:
    """Replaces a file by JSON Lines, as `write_atomically` does."""
    with replacing(path, private=private) as file:
        file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def load_lines(path: Path) -> list[dict[str, Any]]:
    """Loads JSON Lines that `write_lines` wrote.

    Raises:
        OSError: the file cannot be read.
        InputError: a line is no object.
    """
    with path.open("rb"):
        return [row for _, row in read_lines(path, "an object")]
