"""Links the rows of a ledger in a hash chain: every row contains its own SHA-256 and that of the previous row.

The chain reveals a row that was changed, removed or inserted. It cannot reveal that the last rows were removed or that
the whole chain was rewritten: anchors keep the hash of the last row elsewhere, and signatures need a secret key.
"""

import json
from collections.abc import Iterable, Iterator
from hashlib import sha256
from json.encoder import encode_basestring_ascii
from typing import NamedTuple

from privmix.foundation.errors import LedgerCorrupt

GENESIS = "0" * 64

_as_json = json.JSONEncoder(default=repr).encode


class LedgerRow(NamedTuple):
    """Holds one row of the ledger. `seq` counts from 1; `at` is UTC in ISO 8601; `body` is JSON, hashed verbatim.

    A tuple, because a verification makes hundreds of thousands of them.
    """

    seq: int
    epoch: int
    kind: str
    body: str
    at: str
    previous: str
    hash: str

    @property
    def digest(self) -> str:
        """The SHA-256 of all fields except `hash`, as a JSON list, which keeps the fields apart.

        A value that JSON cannot represent (SQLite stores bytes in any column) yields a different hash, not an error.
        """
        seq, epoch, *texts = self[:-1]
        try:
            kind, body, at, previous = map(encode_basestring_ascii, texts)  # three times as fast as the whole encoder
            hashed = f"[{seq!r}, {epoch!r}, {kind}, {body}, {at}, {previous}]"
        except TypeError:
            hashed = _as_json([*self[:-1]])
        return sha256(hashed.encode()).hexdigest()


def link(previous: LedgerRow | None, *, epoch: int, kind: str, body: str, at: str) -> LedgerRow:
    """Returns the row that follows `previous`; the first row if `previous` is None."""
    seq, before = (previous.seq + 1, previous.hash) if previous else (1, GENESIS)
    unsealed = LedgerRow(seq, epoch, kind, body, at, before, hash="")
    return unsealed._replace(hash=unsealed.digest)


def verified(rows: Iterable[LedgerRow], previous: LedgerRow | None = None) -> Iterator[LedgerRow]:
    """Yields the rows and checks that each one is intact and follows its predecessor.

    Raises:
        LedgerCorrupt: a row was changed, removed or replaced. The message names the first such row.
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
