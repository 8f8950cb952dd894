"""Defines the interface of a ledger's database backend."""

from abc import ABC, abstractmethod
from typing import ClassVar

from sqlalchemy import Engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from services.budget.errors import LedgerError
from services.budget.store.schema import Access


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
            LedgerMissing: the URL names no database that can store a ledger.
        """
        return url

    def label(self, url: URL) -> str:
        """Returns the database's name for messages and receipts, without its password."""
        return str(url)

    @abstractmethod
    def engine(self, url: URL, access: Access) -> Engine:
        """Returns a SQLAlchemy engine for the database. It connects in the first transaction.

        Raises:
            LedgerUnavailable: the driver is not installed.
        """

    @abstractmethod
    def explain(self, error: DBAPIError) -> LedgerError:
        """Translates an error of the database into a ledger error whose message states the fix."""
