"""Claim: a writer creates, recognizes the schema of a ledger; a reader does not change it."""

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect

from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reader import read
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.schema import REVISION_TABLE, ledger_table
from privmix.foundation.errors import LedgerForeign
from tests.postgresql import Server
from tests.services.budget.events import COARSE

NEWEST = "0001"


def revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection, opts={"version_table": REVISION_TABLE}).get_current_revision()


def test_a_new_ledger_has_the_newest_revision_and_the_table_that_queries_expect(
    place: str, terms: PrivacyBudget
) -> None:
    Ledger.create(place, terms)
    with LedgerDatabase(place, "read").transaction() as connection:
        assert revision(connection) == NEWEST
        context = MigrationContext.configure(connection, opts={"version_table": REVISION_TABLE, "compare_type": True})
        assert compare_metadata(context, ledger_table.metadata) == []


def test_a_ledger_without_a_revision_is_refused_and_not_changed(place: str, terms: PrivacyBudget) -> None:
    Ledger.create(place, terms).lease(COARSE, 10)
    with LedgerDatabase(place, "write").transaction() as connection:
        connection.exec_driver_sql(f"DROP TABLE {REVISION_TABLE}")
    for use in (lambda: Ledger.create(place, terms), lambda: read(place)):
        with pytest.raises(LedgerForeign, match=f"no revision: restore the table {REVISION_TABLE}"):
            use()
    with LedgerDatabase(place, "read").transaction() as connection:
        assert not inspect(connection).has_table(REVISION_TABLE)


def test_a_newer_schema_is_refused_and_not_changed(place: str, terms: PrivacyBudget) -> None:
    Ledger.create(place, terms).lease(COARSE, 10)
    with LedgerDatabase(place, "write").transaction() as connection:
        connection.exec_driver_sql(f"UPDATE {REVISION_TABLE} SET version_num = '9999'")
    for use in (lambda: Ledger.create(place, terms), lambda: read(place)):
        with pytest.raises(
            LedgerForeign, match=r"revision 9999.*the newest revision that this version of privmix knows is 0001"
        ):
            use()
    with LedgerDatabase(place, "read").transaction() as connection:
        assert revision(connection) == "9999"


def test_a_second_opening_does_not_change_the_schema(place: str, terms: PrivacyBudget) -> None:
    Ledger.create(place, terms)
    with LedgerDatabase(place, "read").transaction() as connection:
        before = layout_of(connection)
    Ledger.create(place, terms)
    with LedgerDatabase(place, "read").transaction() as connection:
        assert layout_of(connection) == before


def layout_of(connection: Connection) -> list[tuple[object, ...]]:
    catalogue = (
        "SELECT name, sql FROM sqlite_schema ORDER BY name"
        if connection.dialect.name == "sqlite"
        else "SELECT oid::bigint, relname FROM pg_class WHERE relname ~ '^privmix' ORDER BY 1"
    )
    return [tuple(row) for row in connection.exec_driver_sql(catalogue)]


def test_tables_of_other_alembic_users_are_not_changed(postgresql: Server, terms: PrivacyBudget) -> None:
    url = postgresql.database()
    with postgresql.connect(url) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)")
        connection.execute("INSERT INTO alembic_version VALUES ('theirs')")
    Ledger.create(url, terms).lease(COARSE, 1)
    with postgresql.connect(url) as connection:
        assert connection.execute("SELECT * FROM alembic_version").fetchall() == [("theirs",)]
    assert read(url).charged == {COARSE: 1}
