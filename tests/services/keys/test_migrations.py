"""Claim: the keys database is created, recognised and migrated to the schema that the queries expect."""

import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, make_url

from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.store.schema import _migrations
from privmix.database.service import REVISION_TABLE, ServiceDatabase, metadata, migrations
from privmix.database.upgrade import Migrations
from privmix.foundation.errors import KeysUnavailable
from privmix.keys.store import KeyStore
from tests.postgresql import Server


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'keys.db'}"
    server: Server = request.getfixturevalue("postgresql")
    return make_url(server.database()).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def differences(connection: Connection) -> list[object]:
    """Returns the differences between the migrated schema and the tables that queries expect."""
    ours = {*metadata.tables}
    options = {
        "version_table": REVISION_TABLE,
        "compare_type": True,
        "include_name": lambda name, kind, _: kind != "table" or name in ours,
    }
    return compare_metadata(MigrationContext.configure(connection, opts=options), metadata)


def test_a_new_database_has_the_newest_revision_and_the_tables_that_queries_expect(where: str) -> None:
    with ServiceDatabase(where).transaction() as connection:
        assert migrations.revision(connection) == migrations.newest
        assert differences(connection) == []


@pytest.mark.parametrize("schema", [migrations, _migrations])
def test_the_revisions_are_known_by_the_names_of_their_files(schema: Migrations) -> None:
    scripts = ScriptDirectory.from_config(schema._configuration())
    assert schema.newest == scripts.get_current_head()
    assert [script.revision for script in scripts.walk_revisions()][::-1] == schema._known


def test_an_open_database_imports_no_alembic(tmp_path: Path) -> None:
    """Its import takes a quarter of a second, in each process that opens a database."""
    ServiceDatabase(tmp_path / "keys.db")
    code = (
        "import sys; from privmix.database.service import ServiceDatabase; "
        "ServiceDatabase(sys.argv[1]); print('alembic' in sys.modules)"
    )
    opened = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "keys.db"], capture_output=True, text=True, check=True
    )
    assert opened.stdout == "False\n"


def test_a_newer_schema_is_refused_and_not_changed(where: str) -> None:
    with ServiceDatabase(where).transaction() as connection:
        connection.exec_driver_sql(f"UPDATE {REVISION_TABLE} SET version_num = '9999'")
    with pytest.raises(KeysUnavailable, match=r"keys .*revision 9999.*use the version that wrote it"):
        ServiceDatabase(where)


def test_keys_and_a_ledger_have_revisions_of_their_own_in_one_database(postgresql: Server) -> None:
    url = postgresql.database()
    terms = PrivacyBudget(ensemble="clinic", epsilon=8.0, delta=1e-5, order=8.0, adjacency="one part added or removed")
    Ledger.create(url, terms)
    KeyStore(ServiceDatabase(url)).create("k")
    assert KeyStore(ServiceDatabase(url)).required()
    Ledger.create(url, terms)
