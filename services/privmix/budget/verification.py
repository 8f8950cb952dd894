"""Verifies a whole ledger or an exported file."""

import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path

from privmix.budget.chain import LedgerRow
from privmix.budget.signing import SigningKey
from privmix.budget.state import Balance, LedgerState
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.rows import every_row
from privmix.database.sqlite import MAGIC
from privmix.foundation.errors import LedgerCorrupt, LedgerError, LedgerUnavailable

LEFT_OUT = "left_out"
"""The field of an exported row that names the private values which its body lacks."""


def verify(
    place: str | Path, *, head: str | None = None, length: int | None = None, key: SigningKey | None = None
) -> Balance:
    """Verifies a whole ledger or exported file and returns its balance.

    Args:
        head: the hash, or a prefix of the hash, of a row that was once the last. The row must still exist.
        length: a former number of rows. The ledger must have at least as many; with `head`, it is that row's number.
        key: the key that must have signed the whole chain.

    Raises:
        LedgerCorrupt: a row was changed, or rows were removed from the end. The message names the row.
        LedgerUnsigned: `key` did not sign the whole chain.
        LedgerError: the ledger cannot be read. The subclass and the message say why.
    """
    exported = _is_exported(place)
    name = str(Path(place).expanduser()) if exported else LedgerDatabase(place, "read").name
    matches: list[int] = []

    def watched(rows: Iterable[LedgerRow]) -> Iterator[LedgerRow]:
        for row in rows:
            if head is not None and row.hash.startswith(head):
                matches.append(row.seq)
            yield row

    try:
        with closing(_exported(Path(name)) if exported else _stored(place)) as rows:
            balance = LedgerState.replay(watched(rows)).balance()
        _check_end(balance, head, length, matches)
        if key is not None:
            key.check(balance)
    except LedgerError as error:
        raise error.of(name) from error
    return balance


def _check_end(balance: Balance, head: str | None, length: int | None, matches: list[int]) -> None:
    if length is not None and balance.rows < length:
        raise LedgerCorrupt(f"it had {length} rows and has {balance.rows} now: rows were removed from its end")
    if head is not None and not (matches if length is None else length in matches):
        problem = f"no row has the hash {head}" if length is None else f"row {length} does not have the hash {head}"
        raise LedgerCorrupt(f"{problem}: rows were removed from its end, or it was rewritten")


def _stored(place: str | Path) -> Generator[LedgerRow, None, None]:
    with LedgerDatabase(place, "read").transaction() as connection:
        yield from every_row(connection)


def _exported(path: Path) -> Generator[LedgerRow, None, None]:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                yield _parsed(number, line)
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
