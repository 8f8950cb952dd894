"""Stores how many part groups an operator chose to serve, because Ray forgets it when the head node is lost."""

from dataclasses import dataclass

from sqlalchemy import delete, insert, select

from privmix.database.service import ServiceDatabase, fleets_table


@dataclass(frozen=True, slots=True)
class FleetSize:
    """Stores the number of part groups of one ensemble. It holds until the configuration names another number.

    Attributes:
        database: the database of the service, a path or a URL.
        namespace: the Ray namespace of the ensemble's actors.
        configured: the number of part groups in the configuration.
    """

    database: str
    namespace: str
    configured: int

    def read(self) -> int:
        """Returns the number that was stored under this configuration; without one, the configured number.

        Raises:
            KeysUnavailable: the database failed.
        """
        stored = select(fleets_table.c.shards).where(
            fleets_table.c.namespace == self.namespace, fleets_table.c.configured == self.configured
        )
        with ServiceDatabase(self.database).transaction() as connection:
            shards: int | None = connection.execute(stored).scalar()
        return self.configured if shards is None else shards

    def write(self, shards: int) -> None:
        """Stores the number that an operator chose.

        Raises:
            KeysUnavailable: the database failed, and the stored number is the one of before.
        """
        with ServiceDatabase(self.database).transaction() as connection:
            connection.execute(delete(fleets_table).where(fleets_table.c.namespace == self.namespace))
            connection.execute(
                insert(fleets_table).values(namespace=self.namespace, configured=self.configured, shards=shards)
            )
