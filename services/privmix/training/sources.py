"""Finds the files of a corpus: files, globs, and directories that `save_to_disk` of `datasets` wrote.

for source in sources(["notes/*.csv", "saved"]):
    source.rows(fields)
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob as _matching
from pathlib import Path

from privmix.foundation.errors import CorpusError
from privmix.training.rows import CorpusRow, RowFields, rows, table_rows, wanted

_BATCH_ROWS = 256


@dataclass(frozen=True)
class FileSource:
    """Reads one file."""

    name: str

    def rows(self, fields: RowFields) -> Iterator[tuple[str, CorpusRow]]:
        """Yields each row with its place. Raises CorpusError as `privmix.training.rows.rows`."""
        try:
            with Path(self.name).open("rb") as file:
                yield from rows(file, self.name, fields)
        except OSError as error:
            raise CorpusError(f"corpus {self.name}: cannot be read: {error.strerror or type(error).__name__}") from None


@dataclass(frozen=True)
class SavedDataset:
    """Reads a dataset that `save_to_disk` wrote."""

    name: str

    def rows(self, fields: RowFields) -> Iterator[tuple[str, CorpusRow]]:
        """Yields each row with its place.

        Raises:
            CorpusError: it is damaged, has several splits, or lacks a field.
        """
        from datasets import DatasetDict, load_from_disk

        try:
            dataset = load_from_disk(self.name)
        # The Arrow reader raises errors of many types for a damaged directory.
        except Exception as error:
            raise CorpusError(
                f"corpus {self.name}: is a directory, but not of a Hugging Face dataset that `save_to_disk` wrote; "
                f"save it so, or name its files, such as '{self.name}/*.jsonl'"
            ) from error
        if isinstance(dataset, DatasetDict):
            directories = ", ".join(str(Path(self.name) / split) for split in dataset)
            raise CorpusError(f"corpus {self.name}: has splits; name one of the directories: {directories}")
        table, done = dataset.select_columns(wanted(dataset.column_names, fields, f"corpus {self.name}")), 0
        for batch in table.with_format("arrow").iter(_BATCH_ROWS):
            yield from table_rows(batch, done)
            done += len(batch)


Source = FileSource | SavedDataset


def sources(given: Sequence[str]) -> list[Source]:
    """Returns what to read for the arguments of a command, each once and in their order; a glob's files are sorted.

    Raises:
        CorpusError: there is nothing of a name.
    """
    check(given)
    names = dict.fromkeys(name for each in given for name in ([each] if Path(each).exists() else _glob(each)))
    return [SavedDataset(name) if Path(name).is_dir() else FileSource(name) for name in names]


def check(given: Sequence[str]) -> None:
    """Checks that files and directories exist, before other work.

    Raises:
        CorpusError: one does not exist.
    """
    if not given:
        raise CorpusError("corpus: name at least one file")
    for each in given:
        if Path(each).exists() or _glob(each):
            continue
        if re.match(r"\w{2,}:/", each):  # `Path` makes one slash of two
            raise CorpusError(f"corpus {re.sub(':/+', '://', each, count=1)}: is a URL; download it, and name the file")
        raise CorpusError(f"corpus {each}: there is no such file or directory")


def _glob(pattern: str) -> list[str]:
    return sorted(_matching(pattern, recursive=True))  # noqa: PTH207, pathlib knows no absolute patterns
