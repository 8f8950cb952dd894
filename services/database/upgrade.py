"""Updates database schemas with Alembic's revisions, inside the caller's transaction."""

import threading
from functools import cached_property

from alembic import command, context
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from services.errors import UnknownRevision

_migrating = threading.Lock()  # Alembic keeps its state in global variables


class Migrations:
    """Applies the revisions of one schema.

    Args:
        scripts: the package of the revisions in Alembic's notation, such as `services.database:migrations`.
        revision_table: the table for the current revision. Each schema needs its own, because several schemas and other
            users of Alembic can share a database.
    """

    def __init__(self, scripts: str, revision_table: str) -> None:
        self.revision_table = revision_table
        self._location = scripts

    @property
    def newest(self) -> str | None:
        return self._scripts.get_current_head()

    def revision(self, connection: Connection) -> str | None:
        """Returns the revision of a database; None if it has no revision.

        Raises:
            UnknownRevision: the revision is unknown.
        """
        options = {"version_table": self.revision_table}
        revision = MigrationContext.configure(connection, opts=options).get_current_revision()
        if revision is not None and revision not in {script.revision for script in self._scripts.walk_revisions()}:
            raise UnknownRevision(
                f"its schema has revision {revision}, but the newest revision that this version of privmix knows is "
                f"{self.newest}: use the version that wrote it, or a newer one"
            )
        return revision

    def upgrade(self, connection: Connection) -> None:
        """Applies the missing revisions to a database.

        Raises:
            UnknownRevision: the database has an unknown revision.
        """
        if self.revision(connection) == self.newest:
            return
        with _migrating:
            configuration = self._configuration()
            configuration.attributes |= {"connection": connection, "revision_table": self.revision_table}
            command.upgrade(configuration, "head")

    @cached_property
    def _scripts(self) -> ScriptDirectory:
        return ScriptDirectory.from_config(self._configuration())

    def _configuration(self) -> Config:
        configuration = Config()
        configuration.set_main_option("script_location", self._location)
        configuration.set_main_option("path_separator", "os")
        return configuration


def run() -> None:
    """Runs the revisions in the caller's connection and transaction. Each `env.py` calls it."""
    attributes = context.config.attributes
    context.configure(connection=attributes["connection"], version_table=attributes["revision_table"])
    context.run_migrations()
