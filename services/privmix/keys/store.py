"""Manages keys and their shares. Every method is one transaction; it is on disk when the method returns."""

from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, func, insert, select, update

from privmix.database.service import ServiceDatabase, keys_table, reservations_table
from privmix.foundation.errors import DatabaseConflict, KeysError
from privmix.foundation.options import problem
from privmix.keys.records import Key, KeyAccount, Secret, Share, ShareUsage, is_id, new_id
from privmix.keys.reservations import are_required


class KeyStore:
    """Changes the table of keys. Several processes may open it at the same time: the service and `privmix keys`."""

    def __init__(self, database: ServiceDatabase) -> None:
        self._database = database

    def required(self) -> bool:
        """Returns whether a key was ever created (`are_required`)."""
        with self._database.transaction() as connection:
            return are_required(connection)

    def create(self, name: str, *, expires: datetime | None = None, share: Share | None = None) -> tuple[Key, Secret]:
        """Creates a key. Only a hash of its secret is stored, so nothing returns the secret again.

        Raises:
            KeysError: another key has the name, the name has the form of an id, is empty or too long.
        """
        if is_id(name):
            raise KeysError(
                f"name: {name!r} has the form of a key's id, which it could be taken for; choose another name"
            )
        secret = Secret.new()
        try:
            key = Key(id=new_id(), name=name, created=datetime.now(UTC), expires=expires, share=share or Share())
        except ValidationError as error:
            raise KeysError(problem(error)) from None
        try:
            with self._database.transaction() as connection:
                connection.execute(insert(keys_table).values(hash=secret.hash, **key.row()))
        except DatabaseConflict as error:
            raise KeysError(f"name: a key named {name!r} exists already; choose another name") from error
        return key, secret

    def accounts(self) -> list[KeyAccount]:
        """Returns every key with its usage, oldest first."""
        with self._database.transaction() as connection:
            rows = connection.execute(select(keys_table).order_by(keys_table.c.created)).mappings().all()
            owner, tokens = reservations_table.c.key, func.sum(reservations_table.c.tokens)
            held = {key: int(sum_) for key, sum_ in connection.execute(select(owner, tokens).group_by(owner))}
        usages = (ShareUsage(spent=row["spent"], held=held.get(row["id"], 0)) for row in rows)
        return [KeyAccount(key=Key.of(row), usage=usage) for row, usage in zip(rows, usages, strict=True)]

    def limit(self, id_or_name: str, share: Share) -> None:
        """Replaces the share of a key.

        Raises:
            KeysError: no key has this id or name.
        """
        with self._database.transaction() as connection:
            _change(connection, _named(connection, id_or_name), **share.model_dump())

    def rotate(self, id_or_name: str, grace: timedelta = timedelta()) -> tuple[Key, Secret]:
        """Gives a key a new secret. The old one stays valid for `grace`.

        Raises:
            KeysError: no key has this id or name, or the key was revoked.
        """
        secret = Secret.new()
        with self._database.transaction() as connection:
            key = _named(connection, id_or_name)
            if key.revoked:
                raise KeysError(f"{key.name} was revoked and cannot be rotated; create another key")
            until = (datetime.now(UTC) + grace).isoformat()
            _change(connection, key, hash=secret.hash, previous_hash=keys_table.c.hash, previous_until=until)
        return key, secret

    def revoke(self, id_or_name: str) -> Key:
        """Revokes a key permanently. Its usage stays recorded.

        Raises:
            KeysError: no key has this id or name.
        """
        with self._database.transaction() as connection:
            key = _named(connection, id_or_name)
            if key.revoked is None:
                key = key.model_copy(update={"revoked": datetime.now(UTC)})
                _change(connection, key, revoked=key.row()["revoked"])
        return key


def _named(connection: Connection, id_or_name: str) -> Key:
    """Returns the key with an id, or with a name that cannot be an id: so a name never hides another key's id."""
    column = keys_table.c.id if is_id(id_or_name) else keys_table.c.name
    row = connection.execute(select(keys_table).where(column == id_or_name)).mappings().first()
    if row is None:
        raise KeysError(f"no key has the name or id {id_or_name!r}; `privmix keys list` shows all keys")
    return Key.of(row)


def _change(connection: Connection, key: Key, **values: Any) -> None:
    connection.execute(update(keys_table).where(keys_table.c.id == key.id).values(**values))
