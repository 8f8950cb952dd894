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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import BigInteger, Column, Connection, MetaData, String, Table, Text, delete, insert, select

from privmix.budget.records import from_json
from privmix.budget.state import Balance
from privmix.budget.store.schema import ledger_table
from privmix.database.backend import DatabaseUsage
from privmix.database.database import BACKENDS, Database
from privmix.foundation.errors import (
    DatabaseError,
    LedgerError,
    LedgerForeign,
    LedgerMismatch,
    LedgerRolledBack,
    LedgerUnavailable,
    LedgerUnknown,
)
from privmix.foundation.files import create_atomically, locked, write_atomically
from privmix.privacy.events import Event

_anchor_table = Table(
    "privmix_anchor",
    MetaData(),
    Column("ledger", String(64), primary_key=True),
    Column("rows", BigInteger, nullable=False),
    Column("end", Text, nullable=False),
)
_ANCHOR = DatabaseUsage("an anchor", lock=0x616E63686F72, table=_anchor_table.name, connections=1)  # "anchor" in ASCII


class ChainEnd(BaseModel):
    """Describes a ledger after one of its rows.

    Attributes:
        ledger: the ledger's id.
        rows: the number of rows.
        head: the hash of the last row.
        charged: each event, as a JSON object, and the number of tokens charged for it.
        stopped: whether the ledger grants no more private tokens.
        parts: the number of parts with an account; 0 for a ledger without accounts, and in the earliest anchors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ledger: str
    rows: int = Field(ge=1)
    head: str = Field(min_length=64, max_length=64)
    charged: tuple[tuple[dict[str, Any], int], ...] = ()
    stopped: bool = False
    parts: int = Field(0, ge=0)

    @classmethod
    def of(cls, balance: Balance) -> Self:
        return cls(
            ledger=balance.id,
            rows=balance.rows,
            head=balance.head,
            charged=tuple((event.as_dict(), count) for event, count in balance.charged.items()),
            stopped=balance.stopped,
            parts=balance.parts,
        )

    @property
    def tokens(self) -> Counter[Event]:
        """The number of tokens charged, by event."""
        return Counter({from_json(json.dumps(event)): count for event, count in self.charged})

    def is_in(self, connection: Connection) -> bool:
        """Returns whether a ledger's chain contains this end."""
        row = select(ledger_table.c.hash).where(ledger_table.c.seq == self.rows)
        return connection.execute(row).scalar() == self.head


class Anchor(ABC):
    """A place outside a ledger's database that stores the end of its chain."""

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


@dataclass(frozen=True)
class ObjectAnchor(Anchor):
    """Stores the ends of chains as objects under a URL of fsspec, such as `s3://bucket/prefix`.

    An object store cannot compare and swap, but can create an object that does not exist. So each end of a chain is an
    object `ID/NUMBER.json`, and its successor is created under the next number; the largest number is the chain's end.
    Older objects are removed. A writer that was paused may then create a number again, which is not the largest.
    """

    url: str

    @property
    def name(self) -> str:
        return self.url

    def read(self, ledger: str) -> ChainEnd | None:
        return self._last(ledger)[1]

    def swap(self, end: ChainEnd, before: ChainEnd | None) -> ChainEnd:
        number, stored = self._last(end.ledger)
        if not is_same(stored, before):
            return present(stored, self.name)
        with explained(self.name, "written"), suppress(FileExistsError):
            self._create(end.ledger, number + 1, _text(end))
        stored = self.read(end.ledger)
        with suppress(Exception):  # what is left over has no effect
            for old in self._numbers(end.ledger):
                if old < number:
                    self._files.rm_file(self._object(end.ledger, old))
        return present(stored, self.name)

    @cached_property
    def _files(self) -> Any:
        from fsspec import AbstractFileSystem
        from fsspec.core import url_to_fs

        files, _ = url_to_fs(self.url, use_listings_cache=False)
        if not files.async_impl and type(files).pipe_file is AbstractFileSystem.pipe_file:
            raise LedgerForeign(f"the anchor {self.url} cannot create an object only if it does not exist")
        return files

    def _object(self, ledger: str, number: int) -> str:
        return f"{self.url}/{ledger}/{number:016d}.json"

    def _create(self, ledger: str, number: int, text: bytes) -> None:
        self._files.pipe_file(self._object(ledger, number), text, mode="create")

    def _numbers(self, ledger: str) -> list[int]:
        try:
            names = self._files.ls(f"{self.url}/{ledger}", detail=False)
        except FileNotFoundError:
            return []
        stems = (name.rpartition("/")[2].removesuffix(".json") for name in names)
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def _last(self, ledger: str) -> tuple[int, ChainEnd | None]:
        """Returns the largest number and its end; 0 and the end under the name of earlier versions if there is none."""
        while True:
            with explained(self.name, "read"):
                number = max(self._numbers(ledger), default=0)
                place = self._object(ledger, number) if number else f"{self.url}/{ledger}.json"
                try:
                    text = str(self._files.cat_file(place).decode())
                except FileNotFoundError:
                    if number:
                        continue  # it was replaced and removed after it was listed
                    text = None
            return number, _parsed(text, ledger, self.name)


class DatabaseAnchor(Anchor):
    """Stores the ends of chains in a table of a database, which is another one than the ledger's."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._database = Database(url, "write", _ANCHOR)
        self._new = Database(url, "create", _ANCHOR)

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (self._url,)

    @property
    def name(self) -> str:
        return self._database.name

    def read(self, ledger: str) -> ChainEnd | None:
        query = select(_anchor_table.c.end).where(_anchor_table.c.ledger == ledger)
        try:
            with self._new.transaction() as connection:
                _anchor_table.create(connection, checkfirst=True)
                text = connection.execute(query).scalar()
        except DatabaseError as error:
            raise LedgerUnavailable(f"its anchor {self.name} cannot be read: {error}") from error
        return _parsed(text, ledger, self.name)

    def swap(self, end: ChainEnd, before: ChainEnd | None) -> ChainEnd:
        mine = _anchor_table.c.ledger == end.ledger
        try:
            with self._database.transaction() as connection:  # excludes other writers
                _anchor_table.create(connection, checkfirst=True)
                text = connection.execute(select(_anchor_table.c.end).where(mine)).scalar()
                stored = _parsed(text, end.ledger, self.name)
                # The end itself may be stored by a commit that was not confirmed. Storing it again confirms it.
                if not is_same(stored, before) and not is_same(stored, end):
                    return present(stored, self.name)
                connection.execute(delete(_anchor_table).where(mine))
                connection.execute(
                    insert(_anchor_table).values(ledger=end.ledger, rows=end.rows, end=end.model_dump_json())
                )
        except DatabaseError as error:
            raise LedgerUnavailable(f"its anchor {self.name} cannot be written: {error}") from error
        return end


def anchor_at(place: str) -> Anchor:
    """Returns the anchor at a directory, an object store's URL or a database's URL.

    Raises:
        LedgerForeign: the URL is of no known kind.
    """
    scheme = place.partition("://")[0].partition("+")[0] if "://" in place else None
    try:
        if scheme is None:
            return DirectoryAnchor(Path(place).expanduser().absolute())
        if any(scheme in backend.schemes for backend in BACKENDS):
            return DatabaseAnchor(place)
        from fsspec.registry import get_filesystem_class

        get_filesystem_class(scheme)
    except (DatabaseError, ImportError, ValueError) as error:
        raise LedgerForeign(f"the anchor must be a directory, an object store or a database: {error}") from error
    return ObjectAnchor(place.rstrip("/"))


def lost_ends(connection: Connection, balance: Balance, ends: dict[str, ChainEnd]) -> dict[str, ChainEnd]:
    """Returns the ends, by the names of their anchors, that this ledger's chain does not contain.

    Raises:
        LedgerMismatch: an anchor belongs to another ledger.
    """
    for name, end in ends.items():
        if end.ledger != balance.id:
            raise LedgerMismatch(f"its anchor {name} belongs to the ledger {end.ledger}, but this is {balance.id}")
    return {name: end for name, end in ends.items() if not end.is_in(connection)}


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
    return {name: end for name, end in ends.items() if end is not None}


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
    """Raises LedgerUnavailable for the errors of a place, of which each file system of fsspec has its own."""
    try:
        yield
    except LedgerError:
        raise
    except Exception as error:
        raise LedgerUnavailable(f"its anchor {name} cannot be {done}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
