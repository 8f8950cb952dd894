"""Reads the private corpus as a stream of documents, each with its user.

    for document in Corpus(Path("train.jsonl")):
        document.user, document.text

Error messages name the file, the line and the field, but never quote the content, because it is private.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.errors import CorpusError

LINE_LIMIT = 2**20


@dataclass(frozen=True, slots=True)
class Document:
    """Holds one text of one user."""

    user: str
    text: str


@dataclass(eq=False)
class _BadLineError(Exception):
    problem: str
    fix: str
    field: str | None = None


class Corpus:
    """Iterates over the documents of a JSON Lines file or a Hugging Face dataset directory (`save_to_disk`).

    User ids are strings or whole numbers. White space around them is ignored.

    Args:
        path: a file with one JSON object on each line, at most `LINE_LIMIT` bytes long; or a dataset directory.
        user_field, text_field: the names of the two fields.
        skip_bad: skip bad lines and count them in `skipped`, instead of raising.

    Raises:
        CorpusError: `path` does not exist; or, during iteration, a line is bad.
    """

    def __init__(self, path: Path, user_field: str = "user", text_field: str = "text", skip_bad: bool = False) -> None:
        if not path.exists():
            raise CorpusError(f"corpus {path}: there is no such file or directory")
        self.path = path
        self.user_field = user_field
        self.text_field = text_field
        self.skip_bad = skip_bad
        self.skipped = 0

    def __iter__(self) -> Iterator[Document]:
        self.skipped = 0
        unit, rows = ("row", self._dataset_rows()) if self.path.is_dir() else ("line", _lines(self.path))
        for number, row in enumerate(rows, start=1):
            try:
                document = self._document(row if isinstance(row, dict) else _parse(row))
            except _BadLineError as bad:
                if not self.skip_bad:
                    raise self._error(bad, f"{unit} {number}") from None
                self.skipped += 1
            else:
                yield document

    def _document(self, row: dict[str, Any]) -> Document:
        return Document(self._user(row), self._text(row))

    def _user(self, row: dict[str, Any]) -> str:
        user = row.get(self.user_field)
        if isinstance(user, int) and not isinstance(user, bool):
            user = str(user)
        if user is None or user == "":
            raise _BadLineError("names no user", "give it the id of the user who wrote the text", self.user_field)
        if not isinstance(user, str):
            raise _BadLineError("is neither text nor a whole number", "give it the user's id", self.user_field)
        if not user.strip():
            raise _BadLineError("is blank", "give it the id of the user who wrote the text", self.user_field)
        return _encodable(user.strip(), self.user_field)

    def _text(self, row: dict[str, Any]) -> str:
        text = row.get(self.text_field)
        if text is None:
            raise _BadLineError("is missing", "add it, or name the field that holds the text", self.text_field)
        if not isinstance(text, str):
            raise _BadLineError("is not text", "make it a string", self.text_field)
        if not text.strip():
            raise _BadLineError("is empty", "remove the line", self.text_field)
        if len(text) > LINE_LIMIT:
            raise _too_long(self.text_field)
        return _encodable(text, self.text_field)

    def _dataset_rows(self) -> Iterator[dict[str, Any]]:
        from datasets import DatasetDict, load_from_disk

        try:
            dataset = load_from_disk(str(self.path))
        # The Arrow reader raises errors of many types for a damaged directory.
        except Exception as error:
            raise CorpusError(
                f"corpus {self.path}: is a directory, but not of a Hugging Face dataset (made by `save_to_disk`); "
                "name a JSON Lines file or such a directory"
            ) from error
        if isinstance(dataset, DatasetDict):
            raise CorpusError(
                f"corpus {self.path}: has several splits; name one of them: "
                + ", ".join(str(self.path / split) for split in dataset)
            )
        for field in (self.user_field, self.text_field):
            if field not in dataset.column_names:
                raise CorpusError(
                    f"corpus {self.path}: has no column {field!r}, only {', '.join(dataset.column_names)}; "
                    "name the columns that hold the user and the text"
                )
        yield from dataset.select_columns([self.user_field, self.text_field])

    def _error(self, bad: _BadLineError, place: str) -> CorpusError:
        field = f", field {bad.field!r}" if bad.field else ""
        return CorpusError(
            f"{self.path}, {place}{field}: {bad.problem}; {bad.fix}, or leave bad lines out (--skip-bad)"
        )


def _lines(path: Path) -> Iterator[bytes | None]:
    """Yields lines without line ends; None for a line over the limit, which is never in memory as a whole."""
    with path.open("rb") as file:
        while line := file.readline(LINE_LIMIT + 1):
            if len(line) > LINE_LIMIT and not line.endswith(b"\n"):
                while (rest := file.readline(LINE_LIMIT)) and not rest.endswith(b"\n"):
                    pass
                yield None
            else:
                yield line.rstrip(b"\r\n")


def _parse(line: bytes | None) -> dict[str, Any]:
    if line is None:
        raise _too_long(None)
    try:
        # Some editors put a byte order mark at the start of a file.
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _BadLineError("is not UTF-8", "convert the file to UTF-8") from None
    except (ValueError, RecursionError):
        raise _BadLineError("is not JSON", "write one JSON object on each line") from None
    if not isinstance(row, dict):
        raise _BadLineError("is not a JSON object", "write one object with a user and a text on each line")
    return row


def _encodable(value: str, field: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _BadLineError("has half of a surrogate pair", "write the character whole", field) from None
    return value


def _too_long(field: str | None) -> _BadLineError:
    return _BadLineError(f"is longer than {LINE_LIMIT // 2**20} MiB", "split the text into several documents", field)
