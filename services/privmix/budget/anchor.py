"""Records the end of a ledger's chain outside the ledger's database, so that a rolled-back ledger is refused.

A restored snapshot, or a standby that lagged behind its primary, is an intact chain without the last rows. Its writer
would grant the tokens of these rows again. An anchor is written after each commit that charges, before the grant is
returned. So whatever was granted is in the chain that the anchor names, and its counts bound what was released.

An end replaces only the end that its writer knows to be in its own chain, in one step (`Anchor.swap`). So the ends that
an anchor ever stored are in one chain, unless `forfeit` charged those that are not, and each grant stands in it. Of two
writers on copies of a ledger, the second to reach the anchor finds an end that its copy lacks, and it is refused.
"""

import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from privmix.budget.state import Balance
from privmix.budget.store.rows import is_linked
from privmix.foundation.errors import (
    LedgerForeign,
    LedgerMismatch,
    LedgerRolledBack,
    LedgerUnavailable,
    LedgerUnknown,
)
from privmix.foundation.files import create_atomically, locked, write_atomically
from privmix.privacy.events import Event, from_json


class ChainEnd(BaseModel):
    """Describes a ledger after one of its rows.

    Attributes:
        ledger: the ledger's id.
        rows: the number of rows.
        head: the hash of the last row.
        charged: each event, as a JSON object, and the number of tokens charged for it.
        stopped: whether the ledger grants no more private tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ledger: str
    rows: int = Field(ge=1)
    head: str = Field(min_length=64, max_length=64)
    charged: tuple[tuple[dict[str, Any], int], ...] = ()
    stopped: bool = False

    @classmethod
    def of(cls, balance: Balance) -> Self:
        return cls(
            ledger=balance.id,
            rows=balance.rows,
            head=balance.head,
            charged=tuple((event.as_dict(), count) for event, count in balance.charged.items()),
            stopped=balance.stopped,
        )

    @property
    def tokens(self) -> Counter[Event]:
        """The number of tokens charged, by event."""
        return Counter({from_json(json.dumps(event)): count for event, count in self.charged})

    @property
    def row(self) -> tuple[int, str]:
        """The number and the hash of the last row."""
        return self.rows, self.head


class Anchor(ABC):
    """A place outside a ledger's database that stores the end of its chain.

    Attributes:
        fixed: the stored end stays, because the place cannot be written.
    """

    fixed: bool = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in messages, without a password."""

    @abstractmethod
    def read(self, ledger: str) -> ChainEnd | None:
        """Returns the stored end of the chain of the ledger with this id; None if there is none.

        Raises:
            LedgerUnavailable: the place cannot be read now.
            LedgerForeign: the place has something else.
        """

    @abstractmethod
    def swap(self, end: ChainEnd, before: ChainEnd | None) -> ChainEnd:
        """Stores an end durably in place of `before`, in one step. Keeps what is stored if it has another head.

        So of two writers on copies of a ledger, only one can follow an end that both know.

        Args:
            before: the end that must be stored; None if there must be none.

        Returns:
            The end that is stored now: `end`, or the one that was kept.

        Raises:
            LedgerUnavailable: the end may not be stored.
        """


@dataclass(frozen=True)
class DirectoryAnchor(Anchor):
    """Stores the end of each chain as JSON in a file `ID.json` of an existing directory."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def read(self, ledger: str) -> ChainEnd | None:
        with explained(self.name, "read"):
            if not self.path.is_dir():
                raise NotADirectoryError("there is no such directory")
            file = self._file(ledger)
            text = file.read_text(encoding="utf-8") if file.exists() else None
        return _parsed(text, ledger, self.name)

    def swap(self, end: ChainEnd, before: ChainEnd | None) -> ChainEnd:
        file = self._file(end.ledger)
        with explained(self.name, "written"):
            if before is None:
                try:
                    create_atomically(file, _text(end))
                    return end
                except FileExistsError:
                    pass
            with locked(file):
                stored = self.read(end.ledger)
                if not is_same(stored, before):
                    return present(stored, self.name)
                write_atomically(file, _text(end))
        return end

    def _file(self, ledger: str) -> Path:
        return self.path / f"{ledger}.json"


def anchor_at(place: str) -> Anchor:
    """Returns the anchor in a directory.

    Raises:
        LedgerForeign: the place is a URL.
    """
    if "://" in place:
        raise LedgerForeign("budget.anchor must be a directory, on another volume than the ledger, and not a URL")
    return DirectoryAnchor(Path(place).expanduser().absolute())


def lost_ends(connection: Connection, balance: Balance, ends: dict[str, ChainEnd]) -> dict[str, ChainEnd]:
    """Returns the ends, by the names of their anchors, that the chain of the verified `balance` does not contain.

    Raises:
        LedgerMismatch: an anchor belongs to another ledger.
    """
    for name, end in ends.items():
        if end.ledger != balance.id:
            raise LedgerMismatch(f"its anchor {name} belongs to the ledger {end.ledger}, not {balance.id}: correct it")
    return {name: end for name, end in ends.items() if not is_linked(connection, end.row, (balance.rows, balance.head))}


def anchored(anchors: tuple[Anchor, ...], ledger: str, *, create: bool) -> dict[str, ChainEnd]:
    """Returns the stored ends of a ledger's chain, by the names of their anchors.

    Args:
        create: accept an anchor that has none yet.

    Raises:
        LedgerUnknown: an anchor has none, and `create` is False.
        LedgerUnavailable: an anchor cannot be read.
    """
    ends = {anchor.name: anchor.read(ledger) for anchor in anchors}
    for name, end in ends.items():
        if end is None and not create:
            raise LedgerUnknown(
                f"its anchor {name} does not know it, so nobody can tell whether the ledger lost rows; put the anchor "
                "back, or run `privmix ledger init` once if you have just configured it"
            )
    # Who stored a later end has seen a fixed one in the same chain. To look for it again would read all rows since.
    latest = max((end.rows for anchor in anchors if not anchor.fixed and (end := ends[anchor.name])), default=0)
    fixed = {anchor.name for anchor in anchors if anchor.fixed}
    return {name: end for name, end in ends.items() if end and (name not in fixed or end.rows > latest)}


def rolled_back(balance: Balance, lost: Mapping[str, ChainEnd]) -> LedgerRolledBack:
    """Returns the error for a ledger that lacks rows which an anchor knows."""
    name, end = max(lost.items(), key=lambda item: item[1].rows)
    return LedgerRolledBack(
        f"it has {balance.rows} rows, but its anchor {name} knows a chain of {end.rows} rows that ends with "
        f"{end.head[:16]}: it was restored from an older copy, or its server lost commits. Tokens charged in the lost "
        "rows may have been released, so nothing more is granted. Stop the service, and charge them with `privmix "
        "ledger forfeit --config privmix.yaml`"
    )


def is_writable(directory: Path) -> bool:
    """Returns whether this process may create files in a directory."""
    return os.access(directory, os.W_OK | os.X_OK)


def is_same(stored: ChainEnd | None, expected: ChainEnd | None) -> bool:
    """Returns whether both are the end of one chain, or both are None."""
    return (stored and stored.head) == (expected and expected.head)


def present(stored: ChainEnd | None, name: str) -> ChainEnd:
    """Returns the end that an anchor stores. Raises LedgerUnavailable if it is gone."""
    if stored is None:
        raise LedgerUnavailable(f"its anchor {name} is gone: put it back")
    return stored


def _text(end: ChainEnd) -> bytes:
    return end.model_dump_json().encode() + b"\n"


def _parsed(text: str | None, ledger: str, name: str) -> ChainEnd | None:
    try:
        return None if text is None else ChainEnd.model_validate_json(text)
    except ValueError as error:
        raise LedgerForeign(f"{ledger}.json in {name} is not an anchor of this version") from error


@contextmanager
def explained(name: str, done: str) -> Iterator[None]:
    """Raises LedgerUnavailable for the errors of a file system."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LedgerUnavailable(f"its anchor {name} cannot be {done}: {type(error).__name__}: {reason}") from error
