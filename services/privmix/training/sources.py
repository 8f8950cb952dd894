"""Finds the files of a corpus by their names or globs."""

import re
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from privmix.foundation.errors import CorpusError


def files(given: Sequence[str]) -> list[str]:
    """Returns the files for the arguments of a command, each once and in their order; a glob's files are sorted.

    Raises:
        CorpusError: there is nothing of a name, or it is a directory.
    """
    if not given:
        raise CorpusError("corpus: name at least one file")
    return list(dict.fromkeys(name for each in given for name in _named(each)))


def _named(given: str) -> list[str]:
    if Path(given).is_dir():
        raise CorpusError(
            f"corpus {given}: is a directory; name its files, such as '{given}/*.jsonl'. `datasets` writes one by "
            "`to_parquet`"
        )
    if Path(given).exists():
        return [given]
    if matching := sorted(glob(given, recursive=True)):  # noqa: PTH207, pathlib knows no absolute patterns
        return matching
    if re.match(r"\w{2,}:/", given):  # `Path` makes one slash of two
        raise CorpusError(f"corpus {re.sub(':/+', '://', given, count=1)}: is a URL; download it, and name the file")
    raise CorpusError(f"corpus {given}: there is no such file or directory")
