"""Creates the tables of a schema, and refuses a database that has them in another layout."""

from sqlalchemy import Column, Connection, Integer, MetaData, Table, insert, inspect, select

from privmix.foundation.errors import DatabaseForeign


class Schema:
    """Tables whose layout has a number. The database stores it, in a table of its own.

    Args:
        tables: the table of the number joins them.
        name: the name of the number's table, which differs between the schemas in one database.
        number: the number of the layout. Raise it when you change a table.
    """

    def __init__(self, tables: MetaData, name: str, number: int) -> None:
        self._tables = tables
        self._stored = Table(name, tables, Column("number", Integer, primary_key=True, autoincrement=False))
        self._number = number

    def exists(self, connection: Connection) -> bool:
        """Returns whether the database has a number.

        Raises:
            DatabaseForeign: the number is another one.
        """
        if not inspect(connection).has_table(self._stored.name):
            return False
        stored = connection.scalars(select(self._stored)).all()
        if stored != [self._number]:
            raise DatabaseForeign(
                f"its tables have layout {', '.join(map(str, stored)) or 'unknown'}, and this version of privmix knows "
                f"layout {self._number} alone: use the version that wrote it"
            )
        return True

    def create(self, connection: Connection) -> None:
        """Creates the tables in the caller's transaction, which excludes other writers."""
        self._tables.create_all(connection, checkfirst=False)
        connection.execute(insert(self._stored).values(number=self._number))
