"""Stores how many part groups and copies an operator chose, because Ray forgets it when the head node is lost."""

from dataclasses import dataclass

from sqlalchemy import delete, insert, select

from privmix.database.service import ServiceDatabase, fleets_table
from privmix.fleet.shard_map import Size


@dataclass(frozen=True, slots=True)
class StoredSize:
    """Stores the size of one ensemble's fleet. It holds until the configuration names another size.

    Attributes:
        database: the database of the service, a path or a URL.
        namespace: the Ray namespace of the ensemble's actors.
        configured: the size in the configuration.
    """

    database: str
    namespace: str
    configured: Size

    def read(self) -> Size:
        """Returns the size that was stored under this configuration; without one, the configured size.

        Raises:
            KeysUnavailable: the database failed.
        """
        stored = select(fleets_table.c.shards, fleets_table.c.copies).filter_by(**self._key)
        with ServiceDatabase(self.database).transaction() as connection:
            row = connection.execute(stored).one_or_none()
        return self.configured if row is None else Size(*row)

    def write(self, size: Size) -> None:
        """Stores the size that an operator chose.

        Raises:
            KeysUnavailable: the database failed, and the stored size is the one of before.
        """
        with ServiceDatabase(self.database).transaction() as connection:
            connection.execute(delete(fleets_table).filter_by(namespace=self.namespace))
            connection.execute(insert(fleets_table).values(**self._key, shards=size.shards, copies=size.copies))

    @property
    def _key(self) -> dict[str, str | int]:
        shards, copies = self.configured.shards, self.configured.copies
        return {"namespace": self.namespace, "configured_shards": shards, "configured_copies": copies}
