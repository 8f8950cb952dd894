"""Claim: a writer creates, recognizes and upgrades the schema of a ledger; a reader does not change it."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect

from services.budget.errors import LedgerForeign, LedgerMismatch
from services.budget.ledger import Ledger
from services.budget.privacy_budget import PrivacyBudget
from services.budget.reader import read
from services.budget.store.database import LedgerDatabase
from services.budget.store.schema import REVISION_TABLE, ledger_table
from tests.postgresql import Server
from tests.services.budget.events import COARSE

NEWEST = "0002"

# The statements that created ledgers before revisions existed.
OLD_TABLE = """CREATE TABLE privmix_ledger (
    seq {0} NOT NULL, epoch BIGINT NOT NULL, kind VARCHAR(16) NOT NULL, body TEXT NOT NULL, at VARCHAR(32) NOT NULL,
    previous VARCHAR(64) NOT NULL, hash VARCHAR(64) NOT NULL, PRIMARY KEY (seq))"""
OLD = {
    "sqlite": (
        OLD_TABLE.format("INTEGER"),
        "CREATE TRIGGER privmix_ledger_UPDATE BEFORE UPDATE ON privmix_ledger "
        "BEGIN SELECT RAISE(ABORT, 'the privmix ledger is append-only'); END",
        "CREATE TRIGGER privmix_ledger_DELETE BEFORE DELETE ON privmix_ledger "
        "BEGIN SELECT RAISE(ABORT, 'the privmix ledger is append-only'); END",
        "CREATE TRIGGER privmix_ledger_INSERT BEFORE INSERT ON privmix_ledger "
        "WHEN NEW.seq <> (SELECT coalesce(max(seq), 0) + 1 FROM privmix_ledger) "
        "BEGIN SELECT RAISE(ABORT, 'the privmix ledger is append-only'); END",
    ),
    "postgresql": (
        OLD_TABLE.format("BIGINT"),
        "CREATE FUNCTION privmix_ledger_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the privmix ledger is append-only'; END $$",
        "CREATE TRIGGER privmix_ledger_change BEFORE UPDATE OR DELETE OR TRUNCATE ON privmix_ledger "
        "FOR EACH STATEMENT EXECUTE FUNCTION privmix_ledger_refuse()",
    ),
}


def revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection, opts={"version_table": REVISION_TABLE}).get_current_revision()


@pytest.fixture
def old(place: str, terms: PrivacyBudget, tmp_path: Path) -> str:
    """A ledger of 10 tokens of COARSE, without a revision table."""
    writer = Ledger(tmp_path / "model.db", terms)
    writer.lease(COARSE, 10)
    with closing(sqlite3.connect(tmp_path / "model.db")) as model:
        rows = model.execute("SELECT * FROM privmix_ledger ORDER BY seq").fetchall()
    with LedgerDatabase(place, "create").transaction() as connection:
        for statement in OLD[connection.dialect.name]:
            connection.exec_driver_sql(statement)
        for row in rows:
            connection.execute(ledger_table.insert().values(row))
    return place


def test_a_new_ledger_has_the_newest_revision_and_the_table_that_queries_expect(
    place: str, terms: PrivacyBudget
) -> None:
    Ledger(place, terms)
    with LedgerDatabase(place, "read").transaction() as connection:
        assert revision(connection) == NEWEST
        context = MigrationContext.configure(connection, opts={"version_table": REVISION_TABLE, "compare_type": True})
        assert compare_metadata(context, ledger_table.metadata) == []


def test_an_old_ledger_gets_a_revision_and_continues(old: str, terms: PrivacyBudget) -> None:
    before = read(old)
    ledger = Ledger(old, terms, create=False)
    ledger.lease(COARSE, 7)
    after = read(old)
    assert (after.charged, after.rows, after.epoch) == ({COARSE: 17}, before.rows + 2, before.epoch + 1)
    with LedgerDatabase(old, "read").transaction() as connection:
        assert revision(connection) == NEWEST


def test_a_reader_does_not_change_an_old_ledger(old: str) -> None:
    assert read(old).charged == {COARSE: 10}
    with LedgerDatabase(old, "read").transaction() as connection:
        assert inspect(connection).get_table_names() == ["privmix_ledger"]


def test_a_refused_opening_writes_no_revision(old: str, terms: PrivacyBudget) -> None:
    with pytest.raises(LedgerMismatch):
        Ledger(old, terms.model_copy(update={"epsilon": 9.0}))
    with LedgerDatabase(old, "read").transaction() as connection:
        assert inspect(connection).get_table_names() == ["privmix_ledger"]


def test_a_newer_schema_is_refused_and_not_changed(place: str, terms: PrivacyBudget) -> None:
    Ledger(place, terms).lease(COARSE, 10)
    with LedgerDatabase(place, "write").transaction() as connection:
        connection.exec_driver_sql(f"UPDATE {REVISION_TABLE} SET version_num = '9999'")
    for use in (lambda: Ledger(place, terms), lambda: read(place)):
        with pytest.raises(
            LedgerForeign, match=r"revision 9999.*the newest revision that this version of privmix knows is 0002"
        ):
            use()
    with LedgerDatabase(place, "read").transaction() as connection:
        assert revision(connection) == "9999"


def test_a_second_opening_does_not_change_the_schema(place: str, terms: PrivacyBudget) -> None:
    Ledger(place, terms)
    with LedgerDatabase(place, "read").transaction() as connection:
        before = layout_of(connection)
    Ledger(place, terms)
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
    Ledger(url, terms).lease(COARSE, 1)
    with postgresql.connect(url) as connection:
        assert connection.execute("SELECT * FROM alembic_version").fetchall() == [("theirs",)]
    assert read(url).charged == {COARSE: 1}
