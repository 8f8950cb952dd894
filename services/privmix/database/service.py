"""Defines the database of the service: keys, shares, usage, alerts and batches.

It is a SQLite file or a PostgreSQL database.

It is separate from the ledger: keys change and outlive ensembles, while a ledger belongs to one ensemble, has one
writer and is append-only. One PostgreSQL database can hold both, because the names of their tables differ.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    make_url,
)

from privmix.database.backend import DatabaseUsage
from privmix.database.database import Database
from privmix.database.upgrade import Migrations
from privmix.foundation.errors import DatabaseConflict, DatabaseError, DatabaseMissing, KeysUnavailable

_KEYS = DatabaseUsage("the keys", lock=0x6B657973, connections=2)  # the lock is "keys" in ASCII

REVISION_TABLE = "privmix_keys_revision"
migrations = Migrations("privmix.database:migrations", REVISION_TABLE)

metadata = MetaData()

keys_table = Table(
    "privmix_keys",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("owner", String(128), nullable=False),
    Column("group", String(64)),
    Column("scopes", Text, nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Column("hint", String(16), nullable=False),
    Column("previous_hash", String(64), index=True),
    Column("previous_until", String(40)),
    Column("created", String(40), nullable=False),
    Column("expires", String(40)),
    Column("revoked", String(40)),
)

shares_table = Table(
    "privmix_shares",
    metadata,
    Column("subject", String(255), primary_key=True),
    Column("share", Text, nullable=False),
)

usage_table = Table(
    "privmix_usage",
    metadata,
    Column("subject", String(255), primary_key=True),
    Column("day", String(10), primary_key=True),
    Column("spent", BigInteger, nullable=False, default=0),
    Column("held", BigInteger, nullable=False, default=0),
)

reservations_table = Table(
    "privmix_reservations",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("subjects", Text, nullable=False),
    Column("day", String(10), nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("generations", BigInteger, nullable=False),
    Column("gateway", String(64), nullable=False),
)

# `levels` is `privmix.alerts.conditions.Conditions.levels` as JSON.
alert_levels_table = Table(
    "privmix_alert_levels",
    metadata,
    Column("namespace", String(255), primary_key=True),
    Column("levels", Text, nullable=False),
)

alerts_table = Table(
    "privmix_alerts",
    metadata,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("namespace", String(255), nullable=False),
    Column("receiver", String(64), nullable=False),
    Column("id", String(64), nullable=False),
    Column("body", Text, nullable=False),
    Column("created", String(40), nullable=False),
)

# One row: the random id of the database, by which a place of files knows its own.
service_table = Table("privmix_service", metadata, Column("id", String(32), primary_key=True))

# `record` is `privmix.batches.records.File` as JSON; `created` is in Unix microseconds, `expires` in Unix
# seconds. A file with the state "writing" or "deleting" is not shown; its content may exist
# (`privmix.batches.store`).
files_table = Table(
    "privmix_files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("owner", String(80), nullable=False, index=True),
    Column("created", BigInteger, nullable=False),
    Column("expires", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("record", Text, nullable=False),
    Column("state", String(8), nullable=False),
)

# The files of earlier versions with their contents, until the batches actor has moved these out.
file_contents_table = Table(
    "privmix_file_contents",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("owner", String(80), nullable=False),
    Column("created", BigInteger, nullable=False),
    Column("expires", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("record", Text, nullable=False),
    Column("content", LargeBinary, nullable=False),
)

# `record` is `privmix.batches.records.Batch` as JSON; `created` is in Unix microseconds, `ended` in Unix
# seconds.
batches_table = Table(
    "privmix_batches",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("owner", String(80), nullable=False, index=True),
    Column("created", BigInteger, nullable=False),
    Column("status", String(16), nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("output_expires_s", BigInteger),
    Column("record", Text, nullable=False),
    Column("ended", BigInteger),
)

# Holds the lines of open batches that were started; `goes_to` is set once a line is answered. `part` is the id of the
# content with its result, which earlier versions stored in `result`.
batch_lines_table = Table(
    "privmix_batch_lines",
    metadata,
    Column("batch", String(64), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("attempts", BigInteger, nullable=False),
    Column("goes_to", String(8)),
    Column("result", Text),
    Column("prompt_tokens", BigInteger),
    Column("completion_tokens", BigInteger),
    Column("part", String(64), index=True),
)

# One row: the deployment that runs the batches, until a Unix time by the database's clock.
batch_lease_table = Table(
    "privmix_batch_lease",
    metadata,
    Column("holder", String(64), primary_key=True),
    Column("until", BigInteger, nullable=False),
)

# The number of shards that an operator chose for each namespace: `privmix.fleet.size`.
fleets_table = Table(
    "privmix_fleets",
    metadata,
    Column("namespace", String(255), primary_key=True),
    Column("configured", Integer, nullable=False),
    Column("shards", Integer, nullable=False),
)


def default_database(ledger: str) -> str:
    """Returns the default database for a ledger: its PostgreSQL database, or `keys.db` in its directory."""
    if "://" not in ledger:
        return str(Path(ledger).with_name("keys.db"))
    url = make_url(ledger)
    return ledger if url.get_backend_name() != "sqlite" else str(Path(url.database or "").with_name("keys.db"))


class ServiceDatabase:
    """Opens the service's database at `place`, a path or a URL. Creates its tables or migrates them to the newest ones.

    Args:
        create: create a file that does not exist.

    Attributes:
        name: the absolute path, or the URL without its password.

    Raises:
        KeysUnavailable: the database cannot be opened, or a later version of privmix wrote it.
    """

    def __init__(self, place: str | Path, *, create: bool = True) -> None:
        self.name = re.sub(r"//.*@", "//***@", str(place))
        with self._errors():
            self._database = Database(place, "write", _KEYS)
            self.name = self._database.name
            new = Database(place, "create", _KEYS) if create else self._database
            with new.transaction() as connection:
                migrations.upgrade(connection)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Runs a transaction while no other process has one. It is on disk when the context exits.

        Raises:
            KeysUnavailable: the database failed.
            DatabaseConflict: a row violates a uniqueness constraint.
        """
        with self._errors(), self._database.transaction() as connection:
            yield connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except DatabaseConflict:
            raise
        except DatabaseMissing as error:
            raise KeysUnavailable(f"keys {self.name}: {error}. For a new service, run `privmix keys create`") from error
        except DatabaseError as error:
            raise KeysUnavailable(f"keys {self.name}: {error}") from error
