"""Measures how fast a corpus is read: `python -m tests.benchmarks.corpus --json`.

Writes a corpus of Parquet (`--gigabytes` of text, 2 by default) and reads it in turn with pyarrow alone, which decodes
the same two columns into Arrow's batches, and as documents with `Corpus`. Each reading is a process of its own.

- `ratio`: the speed of `Corpus` over that of pyarrow alone.
- `seconds`: the shortest of `--repeats` readings, because other load only adds time.
- `peak_mb`: the largest resident memory of a reading, its libraries included.
"""

import json
import subprocess
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer
from pyarrow import parquet

from privmix_cluster.options import JsonOption
from tests.benchmarks.options import show

MEGABYTE = 10**6
WORDS, WORDS_OF_TEXT, USERS = 20_000, 300, 50_000
_ROWS, _GROUPS = 4096, 8

_PYARROW = """
import pyarrow.parquet as parquet
def read(path):
    table = parquet.ParquetFile(path)
    return sum(len(batch) for batch in table.iter_batches(columns=["user", "text"]))
"""
_CORPUS = """
from privmix.training.corpus import Corpus
def read(path):
    return sum(1 for document in Corpus(path))
"""
_MEASURED = """
import json, re, sys, time
from pathlib import Path
started = time.perf_counter()
rows = read(sys.argv[1])
seconds = time.perf_counter() - started
status = Path("/proc/self/status").read_text()
peak = int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) * 1024 / 1e6
print(json.dumps({"rows": rows, "seconds": seconds, "peak_mb": peak}))
"""
READERS = {"pyarrow": _PYARROW, "corpus": _CORPUS}


def write_corpus(path: Path, size: int) -> int:
    """Writes texts of some 300 drawn words of users, `size` bytes of text together. Returns the number of rows.

    Some groups of rows are repeated, which no reader notices: each group is compressed for itself.
    """
    random = np.random.default_rng(0)
    lengths = random.integers(2, 11, WORDS)
    words = np.array(["".join(map(chr, random.integers(97, 123, length))) for length in lengths])
    groups = []
    for _ in range(_GROUPS):
        texts = [" ".join(row) for row in words[random.zipf(1.3, (_ROWS, WORDS_OF_TEXT)) % WORDS]]
        users = [f"user-{user}" for user in random.integers(0, USERS, _ROWS)]
        groups.append((pa.table({"user": users, "note": texts[::-1], "text": texts}), sum(map(len, texts))))
    written = rows = 0
    with parquet.ParquetWriter(path, groups[0][0].schema) as writer:
        for table, characters in cycle(groups):
            writer.write_table(table, row_group_size=_ROWS)
            written += characters
            rows += _ROWS
            if written >= size:
                break
    return rows


def measure(reader: str, path: Path) -> dict[str, Any]:
    """Reads the corpus in a process of its own."""
    program = READERS[reader] + _MEASURED
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def compare(path: Path, rows: int, repeats: int) -> dict[str, Any]:
    """Reads the corpus with both readers in turn.

    Raises:
        RuntimeError: a reader did not read all rows.
    """
    found = [{reader: measure(reader, path) for reader in READERS} for _ in range(repeats)]
    best = {}
    for reader in READERS:
        readings = [each[reader] for each in found]
        if any(reading["rows"] != rows for reading in readings):
            raise RuntimeError(f"{reader}: did not read all rows")
        best[reader] = {
            "seconds": round(min(reading["seconds"] for reading in readings), 3),
            "peak_mb": round(max(reading["peak_mb"] for reading in readings), 1),
        }
    return {**best, "ratio": round(best["pyarrow"]["seconds"] / best["corpus"]["seconds"], 3)}


def main(
    gigabytes: Annotated[float, typer.Option(help="The size of the text.")] = 2.0,
    repeats: Annotated[int, typer.Option(min=1, help="The number of readings with each reader.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="10 MB, read once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the speed of reading a corpus of Parquet with pyarrow's own."""
    if quick:
        gigabytes, repeats = 0.01, 1
    with tempfile.TemporaryDirectory() as directory:
        path, started = Path(directory) / "corpus.parquet", time.monotonic()
        rows = write_corpus(path, int(gigabytes * 1000 * MEGABYTE))
        typer.echo(f"wrote {rows} rows in {time.monotonic() - started:.0f} s", err=True)
        found = {
            "text_gb": gigabytes,
            "rows": rows,
            "file_mb": round(path.stat().st_size / MEGABYTE),
            "repeats": repeats,
        }
        found |= compare(path, rows, repeats)
    show(found, as_json)


if __name__ == "__main__":
    typer.run(main)
