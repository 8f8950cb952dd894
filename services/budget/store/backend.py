"""What a kind of database must provide to keep a ledger."""

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
        name: for messages.
        schemes: of the URLs that name such a database, without a driver.
    """

    name: ClassVar[str]
    schemes: ClassVar[tuple[str, ...]]

    def location(self, url: URL) -> URL:
        """Returns the URL with the defaults filled in.

        Raises:
            LedgerMissing: the URL names no database that can keep a ledger.
        """
        return url

    def label(self, url: URL) -> str:
        """Returns the database's name for messages and receipts, without its password."""
        return str(url)

    @abstractmethod
    def engine(self, url: URL, access: Access) -> Engine:
        """Returns SQLAlchemy's engine of the database; it connects with the first transaction.

        Raises:
            LedgerUnavailable: the driver is not installed.
        """

    @abstractmethod
    def explain(self, error: DBAPIError) -> LedgerError:
        """Returns what a failure of the database means, with the remedy."""
