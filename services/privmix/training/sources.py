"""Finds the files of a corpus by their names or globs."""

import re
from collections.abc import Sequence
from glob import glob as _matching
from pathlib import Path

from privmix.foundation.errors import CorpusError


def files(given: Sequence[str]) -> list[str]:
    """Returns the files for the arguments of a command, each once and in their order; a glob's files are sorted.

    Raises:
        CorpusError: there is nothing of a name, or it is a directory.
    """
    check(given)
    return list(dict.fromkeys(name for each in given for name in ([each] if Path(each).exists() else _glob(each))))


def check(given: Sequence[str]) -> None:
    """Checks that files exist, before other work.

    Raises:
        CorpusError: one does not exist, or is a directory.
    """
    if not given:
        raise CorpusError("corpus: name at least one file")
    for each in given:
        if Path(each).is_dir():
            raise CorpusError(
                f"corpus {each}: is a directory; name its files, such as '{each}/*.jsonl'. `datasets` writes one by "
                "`to_parquet`"
            )
        if Path(each).exists() or _glob(each):
            continue
        if re.match(r"\w{2,}:/", each):  # `Path` makes one slash of two
            raise CorpusError(f"corpus {re.sub(':/+', '://', each, count=1)}: is a URL; download it, and name the file")
        raise CorpusError(f"corpus {each}: there is no such file or directory")


def _glob(pattern: str) -> list[str]:
    return sorted(_matching(pattern, recursive=True))  # noqa: PTH207, pathlib knows no absolute patterns
