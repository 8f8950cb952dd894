"""Verifies a whole ledger or an exported file, on all processors of this machine.

A checkpoint states the whole state before it. So the chain is verified in segments, each from a checkpoint to a later
one: what a segment shows of its last checkpoint, the next one assumes of its first. All of them together show the same
as one replay from the first row.
"""

import json
import multiprocessing
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from privmix.budget.chain import LedgerRow
from privmix.budget.records import Checkpoint
from privmix.budget.signing import SigningKey
from privmix.budget.state import Balance, LedgerState
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.rows import checkpoints, every_row, rows
from privmix.database.sqlite import MAGIC
from privmix.foundation.cpus import available_cpus
from privmix.foundation.errors import LedgerCorrupt, LedgerError, LedgerUnavailable
from privmix.foundation.progress import Display

LEFT_OUT = "left_out"
"""The field of an exported row that names the private values which its body lacks."""

SEGMENT_ROWS = 5_000
"""The least rows of a segment, where checkpoints are closer."""

_CHECKPOINT = f'"kind": "{Checkpoint.kind}"'.encode()


@dataclass(frozen=True)
class Segment:
    """Names consecutive rows of a chain, from the first one or a checkpoint to a later checkpoint or the end.

    Attributes:
        first, last: the numbers of its rows; `last` is None for the last segment.
        start: where the row before the first one begins in a file.
    """

    first: int
    last: int | None
    start: int = 0


class ChainSource(Protocol):
    """What has the rows of a chain. A process may read it while another one does."""

    @property
    def name(self) -> str:
        """The path, or the URL without its password."""

    def segments(self) -> list[Segment]:
        """Returns the segments of the chain."""

    def rows(self, segment: Segment) -> Generator[LedgerRow, None, None]:
        """Yields the row before the segment, unless it is the first segment, and the rows of the segment."""


@dataclass(frozen=True)
class Verified:
    """Describes an intact segment: the hash of its first row, its balance, and the rows with the hash searched for."""

    first: str
    balance: Balance
    matches: tuple[int, ...]


def verify(
    place: str | Path,
    *,
    head: str | None = None,
    length: int | None = None,
    key: SigningKey | None = None,
    display: Display | None = None,
    workers: int | None = None,
) -> Balance:
    """Verifies a whole ledger or exported file and returns its balance.

    Args:
        head: the hash, or a prefix of the hash, of a row that was once the last. The row must still exist.
        length: a former number of rows. The ledger must have at least as many; with `head`, it is that row's number.
        key: the key that must have signed the whole chain.
        workers: the number of processes. Default: one for each processor, or none where this process has threads,
            because it forks.

    Raises:
        LedgerCorrupt: a row was changed, or rows were removed from the end. The message names the row.
        LedgerUnsigned: `key` did not sign the whole chain.
        LedgerError: the ledger cannot be read. The subclass and the message say why.
    """
    source: ChainSource = _File(Path(place).expanduser()) if _is_exported(place) else _Database(str(place))
    try:
        balance, matches = _verified(source, head, workers, display or Display())
        _check_end(balance, head, length, matches)
        if key is not None:
            key.check(balance)
    except LedgerError as error:
        raise error.of(source.name) from error
    return balance


def _verified(
    source: ChainSource, head: str | None, workers: int | None, display: Display
) -> tuple[Balance, list[int]]:
    """Returns the balance, and the rows with the hash `head`."""
    segments = source.segments()
    if workers is None:
        workers = available_cpus() if threading.active_count() == 1 else 1
    verified: list[Verified] = []
    with display, _mapped(min(workers, len(segments)), partial(_verify, source, head), segments) as results:
        for segment, result in zip(segments, results, strict=True):
            if verified and result.first != verified[-1].balance.head:
                raise LedgerCorrupt(f"row {segment.first} changed while it was verified: verify it again")
            verified.append(result)
            display.show({"rows": len(verified) / len(segments)})
    signature = next((each.balance.signature for each in reversed(verified) if each.balance.signature), None)
    matches = [row for each in verified for row in each.matches]
    return replace(verified[-1].balance, signature=signature), matches


def _check_end(balance: Balance, head: str | None, length: int | None, matches: Sequence[int]) -> None:
    if length is not None and balance.rows < length:
        raise LedgerCorrupt(f"it had {length} rows and has {balance.rows} now: rows were removed from its end")
    if head is not None and not (matches if length is None else length in matches):
        problem = f"no row has the hash {head}" if length is None else f"row {length} does not have the hash {head}"
        raise LedgerCorrupt(f"{problem}: rows were removed from its end, or it was rewritten")


def _verify(source: ChainSource, head: str | None, segment: Segment) -> Verified:
    matches: list[int] = []
    hashes: list[str] = []

    def watched(rows: Iterable[LedgerRow]) -> Iterator[LedgerRow]:
        for row in rows:
            if not hashes:
                hashes.append(row.hash)
            if head is not None and row.hash.startswith(head):
                matches.append(row.seq)
            yield row

    with closing(source.rows(segment)) as read:
        before = next(read, None) if segment.first > 1 else None
        balance = LedgerState.replay(watched(read), before).balance()
    return Verified(hashes[0], balance, tuple(matches))


@contextmanager
def _mapped(workers: int, verify: "partial[Verified]", segments: Sequence[Segment]) -> Iterator[Iterator[Verified]]:
    """Yields the results in their order, so that the first bad row is named. The processes end with the block."""
    if workers < 2:
        yield map(verify, segments)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))
    try:
        yield pool.map(verify, segments)
    finally:
        pool.shutdown(cancel_futures=True)


def _divided(checkpoints: Iterable[tuple[int, int]]) -> list[Segment]:
    """Returns the segments between checkpoints, given their numbers and places in a file."""
    starts = [(1, 0)]
    for number, start in checkpoints:
        if number - starts[-1][0] >= SEGMENT_ROWS:
            starts.append((number, start))
    ends: list[tuple[int | None, int]] = [*starts[1:], (None, 0)]
    return [Segment(first, last, start) for (first, start), (last, _) in zip(starts, ends, strict=True)]


@dataclass(frozen=True)
class _Database:
    place: str

    @property
    def name(self) -> str:
        return LedgerDatabase(self.place, "read").name

    def segments(self) -> list[Segment]:
        with LedgerDatabase(self.place, "read").transaction() as connection:
            every_row(connection)  # checks that there is a ledger
            return _divided((number, 0) for number in checkpoints(connection))

    def rows(self, segment: Segment) -> Generator[LedgerRow, None, None]:
        with LedgerDatabase(self.place, "read").transaction() as connection:
            yield from rows(connection, since=max(1, segment.first - 1), until=segment.last)


@dataclass(frozen=True)
class _File:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def segments(self) -> list[Segment]:
        found, place, before = list[tuple[int, int]](), 0, 0
        with self._opened() as lines:
            for number, line in enumerate(lines, start=1):
                if _CHECKPOINT in line:
                    found.append((number, before))
                before, place = place, place + len(line)
        return _divided(found)

    def rows(self, segment: Segment) -> Generator[LedgerRow, None, None]:
        with self._opened() as lines:
            lines.seek(segment.start)
            for number, line in enumerate(lines, start=max(1, segment.first - 1)):
                yield _parsed(number, line.decode(errors="replace"))
                if number == segment.last:
                    return

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            with self.path.open("rb") as lines:
                yield lines
        except OSError as error:
            raise LedgerUnavailable(f"{error.strerror}; check that this user may read it") from error


def _is_exported(place: str | Path) -> bool:
    path = Path(place).expanduser()
    if "://" in str(place) or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) not in (b"", MAGIC)


def _parsed(number: int, line: str) -> LedgerRow:
    try:
        row = json.loads(line)
        if LEFT_OUT in row:
            raise LedgerUnavailable(
                f"line {number} was exported without its private values, so nothing from there can be verified; verify "
                "the ledger, or a file of `privmix ledger export --private-values`"
            )
        return LedgerRow(**row)
    except (TypeError, ValueError) as error:
        raise LedgerCorrupt(
            f"line {number} is not a row of an exported ledger, and the file is not a SQLite database"
        ) from error
