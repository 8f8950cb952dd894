"""Updates database schemas with Alembic's revisions, inside the caller's transaction.

Alembic is imported for an update alone: its import takes a quarter of a second of a processor, in each process of a
service that opens a database.
"""

import threading
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Select, column, inspect, select, table

from privmix.foundation.errors import UnknownRevision

if TYPE_CHECKING:
    from alembic.config import Config

_migrating = threading.Lock()  # Alembic keeps its state in global variables


class Migrations:
    """Applies the revisions of one schema.

    Args:
        scripts: the package of the revisions in Alembic's notation, such as `privmix.database:migrations`.
        revision_table: the table for the current revision. Each schema needs its own, because several schemas and other
            users of Alembic can share a database.
    """

    def __init__(self, scripts: str, revision_table: str) -> None:
        self.revision_table = revision_table
        self._location = scripts

    @property
    def newest(self) -> str:
        return self._known[-1]

    def revision(self, connection: Connection) -> str | None:
        """Returns the revision of a database; None if it has no revision.

        Raises:
            UnknownRevision: the revision is unknown.
        """
        if not inspect(connection).has_table(self.revision_table):
            return None
        found: Select[tuple[Any]] = select(column("version_num")).select_from(table(self.revision_table))
        revision: str | None = connection.scalars(found).one_or_none()
        if revision is not None and revision not in self._known:
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
        from alembic import command

        configuration = self._configuration()
        configuration.attributes |= {"connection": connection, "revision_table": self.revision_table}
        with _migrating:
            command.upgrade(configuration, "head")

    def _configuration(self) -> "Config":
        from alembic.config import Config

        configuration = Config()
        configuration.set_main_option("script_location", self._location)
        configuration.set_main_option("path_separator", "os")
        return configuration

    @cached_property
    def _known(self) -> list[str]:
        """The revisions, the oldest first. Each names its file: `r0001_baseline.py` is revision 0001."""
        package, _, folder = self._location.partition(":")
        names = (entry.name for entry in files(package).joinpath(folder, "versions").iterdir())
        return sorted(name[1:].partition("_")[0] for name in names if name.startswith("r") and name.endswith(".py"))


def run() -> None:
    """Runs the revisions in the caller's connection and transaction. Each `env.py` calls it."""
    from alembic import context

    attributes = context.config.attributes
    context.configure(connection=attributes["connection"], version_table=attributes["revision_table"])
    context.run_migrations()
