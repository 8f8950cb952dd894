"""The layout of a database, brought up to date by Alembic's revisions inside the caller's transaction."""

import threading
from functools import cached_property

from alembic import command, context
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

_migrating = threading.Lock()  # Alembic keeps what it works on in its modules


class UnknownRevision(Exception):  # noqa: N818 (the name says the state)
    """The layout is of a revision that this version of privmix does not know."""


class Migrations:
    """The revisions of one layout.

    Args:
        scripts: the package that holds them, as Alembic writes it: `services.keys:migrations`.
        revision_table: where a database keeps its revision; of its own for each layout, because several layouts, and
            others who use Alembic, may share a database.
    """

    def __init__(self, scripts: str, revision_table: str) -> None:
        self.revision_table = revision_table
        self._location = scripts

    @property
    def newest(self) -> str | None:
        return self._scripts.get_current_head()

    def revision(self, connection: Connection) -> str | None:
        """Return the revision that a database has; None where it has none.

        Raises:
            UnknownRevision: it is none of these.
        """
        options = {"version_table": self.revision_table}
        revision = MigrationContext.configure(connection, opts=options).get_current_revision()
        if revision is not None and revision not in {script.revision for script in self._scripts.walk_revisions()}:
            raise UnknownRevision(
                f"its layout is of revision {revision}, and this version of privmix knows no later one than "
                f"{self.newest}: use the version that wrote it, or a newer one"
            )
        return revision

    def upgrade(self, connection: Connection, *, start: str | None = None) -> None:
        """Apply the revisions that a database lacks; writes nothing where it has all of them.

        Args:
            start: the revision that a database has which was made before revisions were recorded.

        Raises:
            UnknownRevision: it has none of these.
        """
        revision = self.revision(connection)
        if revision == self.newest:
            return
        with _migrating:
            configuration = self._configuration()
            configuration.attributes |= {"connection": connection, "revision_table": self.revision_table}
            if revision is None and start is not None:
                command.stamp(configuration, start)
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
    """Run the revisions in the caller's connection and transaction; what every `env.py` calls."""
    attributes = context.config.attributes
    context.configure(connection=attributes["connection"], version_table=attributes["revision_table"])
    context.run_migrations()
