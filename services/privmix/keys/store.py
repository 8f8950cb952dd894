"""Stores keys, shares and usage. Every method is one transaction; it is on disk when the method returns."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from privmix.database.clock import now
from privmix.database.service import (
    ServiceDatabase,
    keys_table,
    shares_table,
)
from privmix.foundation.errors import DatabaseConflict, KeysError, UnknownKey
from privmix.keys.records import (
    SCOPES,
    Key,
    KeyAccount,
    Scope,
    Secret,
    Share,
    ShareUsage,
    is_id,
    new_id,
)
from privmix.keys.subjects import group_subject, key_subject, subjects_of
from privmix.keys.transactions import (
    OpenReservation,
    Operation,
    apply,
    are_required,
    key_of,
    reservations,
    shares,
    usages,
)


class KeyStore:
    """Owns the tables of keys. Several processes may open it at the same time: the service and `privmix keys`."""

    def __init__(self, database: ServiceDatabase) -> None:
        self._database = database

    def required(self) -> bool:
        """Returns whether a key was ever created (`are_required`)."""
        with self._database.transaction() as connection:
            return are_required(connection)

    def create(
        self,
        name: str,
        *,
        owner: str = "",
        group: str | None = None,
        scopes: Sequence[Scope] = SCOPES,
        expires: datetime | None = None,
        share: Share | None = None,
    ) -> tuple[Key, Secret]:
        """Creates a key. Only a hash of its secret is stored, so nothing returns the secret again.

        Raises:
            KeysError: another key has the name, or the name has the form of an id.
        """
        if is_id(name):
            raise KeysError(
                f"name: {name!r} has the form of a key's id, which it could be taken for; choose another name"
            )
        secret = Secret.new()
        key = Key(
            id=new_id(),
            name=name,
            owner=owner,
            group=group,
            scopes=tuple(scopes),
            hint=secret.hint,
            created=now(),
            expires=expires,
        )
        try:
            with self._database.transaction() as connection:
                connection.execute(insert(keys_table).values(hash=secret.hash, **_row(key)))
                _write_share(connection, key_subject(key), share or Share())
        except DatabaseConflict as error:
            raise KeysError(f"name: a key named {name!r} exists already; choose another name") from error
        return key, secret

    def transact(self, operations: Sequence[Operation]) -> list[Any]:
        """Applies operations in their order, in one transaction, and returns their results."""
        with self._database.transaction() as connection:
            return apply(connection, operations)

    def accounts(self) -> list[KeyAccount]:
        """Returns every key with its share and usage, oldest first."""
        with self._database.transaction() as connection:
            rows = connection.execute(select(keys_table).order_by(keys_table.c.created)).mappings().all()
            limits, used = shares(connection), usages(connection)
        return [_account_of(key_of(row), limits, used) for row in rows]

    def account(self, id_or_name: str) -> KeyAccount:
        """Returns one key with its share and usage.

        Raises:
            UnknownKey: no key has this id or name.
        """
        with self._database.transaction() as connection:
            return _account(connection, _named(connection, id_or_name))

    def usages(self) -> dict[str, ShareUsage]:
        """Returns the usage by subject: of keys, of groups and of the keys of the configuration."""
        with self._database.transaction() as connection:
            return usages(connection)

    def limit(self, id_or_name: str, share: Share) -> KeyAccount:
        """Replaces the share of a key.

        Raises:
            UnknownKey: no key has this id or name.
        """
        with self._database.transaction() as connection:
            key = _named(connection, id_or_name)
            _write_share(connection, key_subject(key), share)
            return _account(connection, key)

    def limit_group(self, group: str, share: Share) -> None:
        """Replaces the share of a group of keys."""
        with self._database.transaction() as connection:
            _write_share(connection, group_subject(group), share)

    def rotate(self, id_or_name: str, grace: timedelta = timedelta()) -> tuple[Key, Secret]:
        """Gives a key a new secret. The old one stays valid for `grace`.

        Raises:
            UnknownKey: no key has this id or name.
            KeysError: the key was revoked.
        """
        secret = Secret.new()
        with self._database.transaction() as connection:
            key = _named(connection, id_or_name)
            if key.revoked:
                raise KeysError(f"{key.name} was revoked and cannot be rotated; create another key")
            hash_ = connection.execute(select(keys_table.c.hash).where(keys_table.c.id == key.id)).scalar_one()
            changes = {
                "hash": secret.hash,
                "hint": secret.hint,
                "previous_hash": hash_,
                "previous_until": (now() + grace).isoformat(),
            }
            connection.execute(update(keys_table).where(keys_table.c.id == key.id).values(changes))
        return key.model_copy(update={"hint": secret.hint}), secret

    def revoke(self, id_or_name: str) -> Key:
        """Revokes a key permanently. Its usage stays recorded.

        Raises:
            UnknownKey: no key has this id or name.
        """
        with self._database.transaction() as connection:
            key = _named(connection, id_or_name)
            if key.revoked is None:
                key = key.model_copy(update={"revoked": now()})
                connection.execute(
                    update(keys_table).where(keys_table.c.id == key.id).values(revoked=_text(key.revoked))
                )
        return key

    def open_reservations(self) -> list[OpenReservation]:
        """Returns all reservations that are not settled."""
        with self._database.transaction() as connection:
            return reservations(connection)


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _row(key: Key) -> dict[str, Any]:
    moments = {name: _text(getattr(key, name)) for name in ("created", "expires", "revoked")}
    return {**key.model_dump(), **moments, "scopes": json.dumps(key.scopes)}


def _named(connection: Connection, id_or_name: str) -> Key:
    """Returns the key with an id, or with a name that cannot be an id: so a name never hides another key's id."""
    return _key(connection, keys_table.c.id if is_id(id_or_name) else keys_table.c.name, id_or_name)


def _key(connection: Connection, column: ColumnElement[str], value: str) -> Key:
    row = connection.execute(select(keys_table).where(column == value)).mappings().first()
    if row is None:
        raise UnknownKey(f"no key has the name or id {value!r}; `privmix keys list` shows all keys")
    return key_of(row)


def _account_of(key: Key, shares: Mapping[str, Share], usages: Mapping[str, ShareUsage]) -> KeyAccount:
    """Returns the account of a key from shares and usages by subject."""
    own, group = key_subject(key), None if key.group is None else group_subject(key.group)
    return KeyAccount(
        key=key,
        share=shares.get(own, Share()),
        usage=usages.get(own, ShareUsage()),
        group_share=None if group is None else shares.get(group, Share()),
        group_usage=None if group is None else usages.get(group, ShareUsage()),
    )


def _account(connection: Connection, key: Key) -> KeyAccount:
    subjects = set(subjects_of(key))
    return _account_of(key, shares(connection, subjects), usages(connection, subjects))


def _write_share(connection: Connection, subject: str, share: Share) -> None:
    connection.execute(delete(shares_table).where(shares_table.c.subject == subject))
    connection.execute(insert(shares_table).values(subject=subject, share=share.model_dump_json()))
