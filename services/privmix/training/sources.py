"""Finds the files of a corpus: files, globs, directories of Hugging Face datasets, and names of datasets.

for source in sources(["notes/*.csv", "org/dialogues"], split="train"):
    source.rows(fields, progress)
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob as _matching
from pathlib import Path
from typing import Any

from privmix.foundation.errors import CorpusError
from privmix.training.rows import CorpusRow, ReadingProgress, RowFields, rows, table_rows, wanted

_SAVED = ("state.json", "dataset_dict.json")
"""The files of which `save_to_disk` writes one."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_BATCH_ROWS = 256


@dataclass(frozen=True)
class FileSource:
    """Reads one file, at a path or at a URL that fsspec knows."""

    name: str

    @property
    def size(self) -> int:
        """The number of bytes."""
        import fsspec

        return int(fsspec.core.url_to_fs(self.name)[0].size(self.name) or 0) if _is_url(self.name) else _size(self.name)

    def rows(self, fields: RowFields, progress: ReadingProgress) -> Iterator[tuple[str, CorpusRow]]:
        """Yields each row with its place. Raises CorpusError as `privmix.training.rows.rows`."""
        import fsspec

        try:
            with fsspec.open(self.name, "rb").open() if _is_url(self.name) else Path(self.name).open("rb") as file:
                yield from rows(file, self.name, fields, progress)
        except OSError as error:
            raise CorpusError(f"corpus {self.name}: cannot be read: {error.strerror or type(error).__name__}") from None


@dataclass(frozen=True)
class SavedDataset:
    """Reads a dataset that `save_to_disk` wrote."""

    path: Path
    split: str | None = None

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        """The number of bytes of its files."""
        return sum(file.stat().st_size for file in self.path.rglob("*.arrow"))

    def rows(self, fields: RowFields, progress: ReadingProgress) -> Iterator[tuple[str, CorpusRow]]:
        """Yields each row with its place.

        Raises:
            CorpusError: it is damaged, has several splits, or lacks a field.
        """
        dataset, size, done = self._loaded(), self.size, 0
        table = dataset.select_columns(wanted(dataset.column_names, fields, f"corpus {self.path}"))
        for batch in table.with_format("arrow").iter(_BATCH_ROWS):
            yield from table_rows(batch, done)
            done += len(batch)
            progress(size * done // len(dataset))

    def _loaded(self) -> Any:
        from datasets import DatasetDict, load_from_disk

        try:
            dataset = load_from_disk(str(self.path))
        # The Arrow reader raises errors of many types for a damaged directory.
        except Exception as error:
            raise CorpusError(
                f"corpus {self.path}: is a directory, but not of a Hugging Face dataset: its files are damaged or "
                "missing; copy it again"
            ) from error
        if not isinstance(dataset, DatasetDict):
            return dataset
        if self.split is None and len(dataset) > 1:
            raise CorpusError(
                f"corpus {self.path}: has several splits; name one with --split, or one of the directories: "
                + ", ".join(str(self.path / split) for split in dataset)
            )
        return dataset[chosen_split(dataset, self.split, str(self.path))]


Source = FileSource | SavedDataset


def sources(given: Sequence[str], split: str | None) -> list[Source]:
    """Returns what to read for the arguments of a command, in their order; a glob's files are sorted.

    Args:
        given: files, globs, directories, and names of datasets.
        split: the split of datasets.

    Raises:
        CorpusError: there is nothing of this name, or a dataset has no such split.
    """
    found = dict.fromkeys(source for each in given for source in _sources(each, split))
    return list(found)


def check(given: Sequence[str], split: str | None) -> None:
    """Checks that local files and directories exist, before other work.

    Raises:
        CorpusError: one does not exist, or is neither a file, a glob nor the name of a dataset.
    """
    if not given:
        raise CorpusError("corpus: name at least one file")
    for each in given:
        if not (Path(each).exists() or _glob(each) or (split and _NAME.fullmatch(each))):
            named = _NAME.fullmatch(each) and not Path(each).suffix
            hint = "; for a dataset of the hub, name its split, too (--split train)" if named else ""
            raise CorpusError(f"corpus {each}: there is no such file or directory{hint}")


def chosen_split(splits: Iterable[str], split: str | None, name: str) -> str:
    """Returns the split to read.

    Raises:
        CorpusError: there is no such split, or several and none is named.
    """
    names = [str(each) for each in splits]
    if split is None and len(names) == 1:
        return names[0]
    if split is None:
        raise CorpusError(f"corpus {name}: has several splits; name one with --split: {', '.join(names)}")
    if split not in names:
        raise CorpusError(f"corpus {name}: has no split {split!r}, only {', '.join(names)}")
    return split


def _sources(each: str, split: str | None) -> list[Source]:
    path = Path(each)
    if path.is_dir():
        if any((path / name).exists() for name in _SAVED):
            return [SavedDataset(path, split)]
        return _files_of(each, split)
    if path.exists():
        return [FileSource(each)]
    if matching := _glob(each):
        return [source for match in matching for source in _sources(match, split)]
    return _files_of(each, split)


def _files_of(name: str, split: str | None) -> list[Source]:
    """Returns the files of a dataset of the hub, or of a copy of its repository, as `datasets` finds them."""
    from datasets import load_dataset_builder

    directory = Path(name).is_dir()
    try:
        files = load_dataset_builder(name).config.data_files
    # The hub client and `datasets` raise errors of many types.
    except Exception as error:
        if directory:
            raise CorpusError(
                f"corpus {name}: is a directory, but not of a Hugging Face dataset; name its files, such as "
                f"'{name}/*.jsonl'"
            ) from error
        raise CorpusError(
            f"corpus {name}: is no file here, and no dataset that could be found on the Hugging Face hub "
            f"({type(error).__name__}); check the name and the network, or give the directory of a downloaded dataset"
        ) from error
    return [FileSource(_local(str(file))) for file in files[chosen_split(files, split, name)]]


def _glob(pattern: str) -> list[str]:
    return sorted(_matching(pattern, recursive=True))  # noqa: PTH207, pathlib knows no absolute patterns


def _local(file: str) -> str:
    return file.removeprefix("file://")


def _is_url(name: str) -> bool:
    return "://" in name


def _size(name: str) -> int:
    try:
        return Path(name).stat().st_size
    except OSError:
        return 0
