"""Defines the interface of a kind of database, and what a database is used for."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from sqlalchemy import Engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from privmix.foundation.errors import DatabaseError

Access = Literal["read", "write", "create"]
"""The purpose of opening a database.
 "create" writes, and it alone creates a file that does not exist."""


@dataclass(frozen=True)
class DatabaseUsage:
    """Says what a database is used for.

    Attributes:
        name: the name of its content in messages, with its article.
        lock: the number of the PostgreSQL advisory lock that excludes other writers of the same content.
        table: a table that a SQLite file has unless it is empty; without it, the file belongs to another application.
            None allows all tables.
        connections: the number of connections that stay open between transactions. A SQLite file with 0 is opened anew
            for each transaction.
    """

    name: str
    lock: int
    table: str | None = None
    connections: int = 0


class Backend(ABC):
    """One kind of database. Its transactions have one writer at a time and are on disk when they return.

    Attributes:
        name: the name in messages.
        schemes: the URL schemes of such a database, without a driver.
    """

    name: ClassVar[str]
    schemes: ClassVar[tuple[str, ...]]

    def location(self, url: URL) -> URL:
        """Returns the URL with the defaults filled in.

        Raises:
            DatabaseMissing: the URL names no database that stores anything durably.
        """
        return url

    def label(self, url: URL) -> str:
        """Returns the database's name for messages and receipts, without its password."""
        return str(url)

    @abstractmethod
    def engine(self, url: URL, access: Access, usage: DatabaseUsage) -> Engine:
        """Returns a SQLAlchemy engine for the database. It connects in the first transaction.

        Raises:
            DatabaseUnavailable: the driver is not installed.
        """

    @abstractmethod
    def explain(self, error: DBAPIError) -> DatabaseError:
        """Translates an error of the driver into an error whose message states the fix."""
