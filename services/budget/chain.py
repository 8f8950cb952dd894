"""The hash chain: every row of a ledger carries the SHA-256 of the one before and its own.

A row that was changed, removed or put in between is found. What a chain cannot show by itself is that its last rows
are gone, or that someone wrote all of it anew: for that, keep the hash of the last row somewhere else and compare.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256

from services.budget.errors import LedgerCorrupt

GENESIS = "0" * 64


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the ledger. `seq` counts from 1; `at` is UTC, ISO 8601; `body` is JSON, hashed as it stands."""

    seq: int
    epoch: int
    kind: str
    body: str
    at: str
    previous: str
    hash: str

    @property
    def digest(self) -> str:
        """SHA-256 over everything but `hash` itself, as a JSON list: fields cannot run into one another.

        What someone put there that JSON does not have (SQLite stores bytes in any column) just makes another hash.
        """
        hashed = [self.seq, self.epoch, self.kind, self.body, self.at, self.previous]
        return sha256(json.dumps(hashed, default=repr).encode()).hexdigest()

    def fields(self) -> dict[str, str | int]:
        """The columns of the ledger's table, by name."""
        return {name: getattr(self, name) for name in self.__slots__}


def link(previous: Row | None, *, epoch: int, kind: str, body: str, at: str) -> Row:
    """The row that follows `previous`, or the first one."""
    seq, before = (previous.seq + 1, previous.hash) if previous else (1, GENESIS)
    unsealed = Row(seq, epoch, kind, body, at, before, hash="")
    return replace(unsealed, hash=unsealed.digest)


def verified(rows: Iterable[Row], previous: Row | None = None) -> Iterator[Row]:
    """The same rows, each checked as it passes to be the one that follows.

    Raises:
        LedgerCorrupt: naming the first row that is not what was written.
    """
    for row in rows:
        seq, before = (previous.seq + 1, previous.hash) if previous else (1, GENESIS)
        if row.seq != seq:
            raise LedgerCorrupt(f"row {seq} is missing: row {row.seq} stands in its place")
        if row.hash != row.digest:
            raise LedgerCorrupt(f"row {seq} was changed after it was written: its contents do not match its hash")
        if row.previous != before:
            raise LedgerCorrupt(f"row {seq} does not follow row {seq - 1}: row {seq - 1} was replaced")
        previous = row
        yield row
