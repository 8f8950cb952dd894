"""Stores keys, shares and usage. Every method is one transaction; it is on disk when the method returns."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import uuid4

from sqlalchemy import Connection, delete, func, insert, or_, select, union, update
from sqlalchemy.exc import IntegrityError

from services.keys.database import (
    Database,
    keys_table,
    reservations_table,
    shares_table,
    usage_table,
)
from services.keys.records import (
    Key,
    KeyAccount,
    KeysError,
    Scope,
    Secret,
    Share,
    ShareAccount,
    UnknownKey,
    Usage,
    now,
)
from services.keys.subjects import OF_ENSEMBLE, ensemble_subject, group_subject, key_subject, split

Limit = Literal["tokens", "tokens_per_day"]


@dataclass(frozen=True)
class Reserved:
    """Reports a new reservation: `tokens` are charged to the shares until `settle` corrects the number."""

    id: str
    tokens: int


@dataclass(frozen=True)
class Wait:
    """Reports that the share of `subject` is in use. It may have more once the requests that hold its tokens end."""

    subject: str


@dataclass(frozen=True)
class Exhausted:
    """Reports that the share of `subject` has nothing left and that no running request holds any of it."""

    subject: str
    limit: Limit


@dataclass(frozen=True)
class Reservation:
    """Holds a reservation whose request has not ended."""

    id: str
    subjects: tuple[str, ...]
    day: str
    tokens: int
    generations: int
    gateway: str


class KeyStore:
    """Owns the tables of keys. Several processes may open it at the same time: the service and `privmix keys`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def required(self) -> bool:
        """Returns whether a key was ever created. From then on clients need one, even if all were revoked."""
        with self._database.transaction() as connection:
            return connection.execute(select(keys_table.c.id).limit(1)).first() is not None

    def create(
        self,
        name: str,
        *,
        owner: str = "",
        group: str | None = None,
        scopes: Sequence[Scope] = ("generate", "privacy"),
        expires: datetime | None = None,
        share: Share | None = None,
    ) -> tuple[Key, Secret]:
        """Creates a key. Only a hash of its secret is stored, so nothing returns the secret again.

        Raises:
            KeysError: another key has the name.
        """
        secret = Secret.new()
        key = Key(
            id=f"key_{uuid4().hex[:12]}",
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
        except IntegrityError as error:
            raise KeysError(f"name: a key named {name!r} exists already; choose another name") from error
        return key, secret

    def find(self, hash_: str) -> Key | None:
        """Returns the key of a secret, valid or not. A rotated secret counts until its grace period ends."""
        current = keys_table.c.hash == hash_
        previous = (keys_table.c.previous_hash == hash_) & (keys_table.c.previous_until > now().isoformat())
        with self._database.transaction() as connection:
            row = connection.execute(select(keys_table).where(or_(current, previous))).mappings().first()
        return _key(row) if row else None

    def accounts(self) -> list[KeyAccount]:
        """Returns every key with its share and usage, oldest first."""
        with self._database.transaction() as connection:
            rows = connection.execute(select(keys_table).order_by(keys_table.c.created)).mappings().all()
            ensembles = _ensembles(connection)
            return [_account(connection, _key(row), ensembles) for row in rows]

    def account(self, id_or_name: str) -> KeyAccount:
        """Returns one key with its share and usage.

        Raises:
            UnknownKey: no key has this id or name.
        """
        with self._database.transaction() as connection:
            return _account(connection, _named(connection, id_or_name), _ensembles(connection))

    def usages(self) -> dict[str, Usage]:
        """Returns the usage by subject: of keys, of groups and of the keys of the configuration."""
        with self._database.transaction() as connection:
            subjects = connection.execute(select(usage_table.c.subject).distinct()).scalars().all()
            return {subject: _usage(connection, subject) for subject in subjects}

    def limit(self, id_or_name: str, share: Share, ensemble: str | None = None) -> KeyAccount:
        """Replaces the share of a key, for all ensembles together or for one.

        Raises:
            UnknownKey: no key has this id or name.
        """
        with self._database.transaction() as connection:
            key = _named(connection, id_or_name)
            _write_share(connection, _in(ensemble, key_subject(key)), share)
            return _account(connection, key, _ensembles(connection))

    def limit_group(self, group: str, share: Share, ensemble: str | None = None) -> None:
        """Replaces the share of a group of keys, for all ensembles together or for one."""
        with self._database.transaction() as connection:
            _write_share(connection, _in(ensemble, group_subject(group)), share)

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

    def shares(self, subjects: Sequence[str]) -> dict[str, Share]:
        """Returns the share of each subject."""
        with self._database.transaction() as connection:
            return {subject: _share(connection, subject) for subject in subjects}

    def reserve(
        self, id_: str, subjects: Sequence[str], wanted: int, generations: int, gateway: str
    ) -> Reserved | Wait | Exhausted:
        """Charges up to `wanted` tokens to all `subjects`.

        Returns `Wait` if a share has less than `wanted` left while running requests hold some of it, because these may
        return tokens. So only used tokens shorten or refuse a request. Repeating a call with the same id returns the
        same reservation.
        """
        day = _today()
        with self._database.transaction() as connection:
            if (before := _reservation(connection, id_)) is not None:
                return Reserved(id_, before.tokens)
            granted = wanted
            exhausted: Exhausted | None = None
            for subject in subjects:
                share, usage = _share(connection, subject), _usage(connection, subject)
                for limit, allowed, charged, held in (
                    ("tokens", share.tokens, usage.charged, usage.held),
                    ("tokens_per_day", share.tokens_per_day, usage.spent_today + usage.held_today, usage.held_today),
                ):
                    if allowed is None or (left := allowed - charged) >= wanted:
                        continue
                    if held:
                        return Wait(subject)
                    if left < granted:
                        granted, exhausted = max(left, 0), Exhausted(subject, limit)  # type: ignore[arg-type]
            if granted == 0 and exhausted is not None:
                return exhausted
            connection.execute(
                insert(reservations_table).values(
                    id=id_,
                    subjects=json.dumps(list(subjects)),
                    day=day,
                    tokens=granted,
                    generations=generations,
                    gateway=gateway,
                )
            )
            for subject in subjects:
                _charge(connection, subject, day, held=granted)
        return Reserved(id_, granted)

    def settle(self, id_: str, used: int | None) -> Reservation | None:
        """Ends a reservation. `used` of its tokens stay charged; all of them if `used` is None.

        Returns the reservation, or None if it was settled before.
        """
        with self._database.transaction() as connection:
            reservation = _reservation(connection, id_)
            if reservation is None:
                return None
            spent = reservation.tokens if used is None else min(used, reservation.tokens)
            for subject in reservation.subjects:
                _charge(connection, subject, reservation.day, held=-reservation.tokens, spent=spent)
            connection.execute(delete(reservations_table).where(reservations_table.c.id == id_))
        return reservation

    def open_reservations(self) -> list[Reservation]:
        """Returns all reservations that are not settled."""
        with self._database.transaction() as connection:
            return [_open(row) for row in connection.execute(select(reservations_table)).mappings()]


def _today() -> str:
    return now().date().isoformat()


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _row(key: Key) -> dict[str, Any]:
    moments = {name: _text(getattr(key, name)) for name in ("created", "expires", "revoked")}
    return {**key.model_dump(), **moments, "scopes": json.dumps(key.scopes)}


def _key(row: Any) -> Key:
    values = {name: row[name] for name in Key.model_fields}
    return Key.model_validate({**values, "scopes": json.loads(row["scopes"])})


def _named(connection: Connection, id_or_name: str) -> Key:
    query = select(keys_table).where(or_(keys_table.c.id == id_or_name, keys_table.c.name == id_or_name))
    row = connection.execute(query).mappings().first()
    if row is None:
        raise UnknownKey(f"no key has the name or id {id_or_name!r}; `privmix keys list` shows all keys")
    return _key(row)


def _in(ensemble: str | None, subject: str) -> str:
    return subject if ensemble is None else ensemble_subject(ensemble, subject)


def _account(connection: Connection, key: Key, ensembles: Mapping[str, Sequence[str]]) -> KeyAccount:
    own = key_subject(key)
    account = KeyAccount(
        key=key,
        share=_share(connection, own),
        usage=_usage(connection, own),
        ensembles=_of_ensembles(connection, own, ensembles),
    )
    if key.group is None:
        return account
    group = group_subject(key.group)
    groups = {
        "group_share": _share(connection, group),
        "group_usage": _usage(connection, group),
        "group_ensembles": _of_ensembles(connection, group, ensembles),
    }
    return account.model_copy(update=groups)


def _ensembles(connection: Connection) -> dict[str, list[str]]:
    """Returns, by subject of a key or group, the ensembles that it has shares of or used on their own."""
    ensembles: defaultdict[str, list[str]] = defaultdict(list)
    columns = (shares_table.c.subject, usage_table.c.subject)
    query = union(*(select(column).where(column.startswith(OF_ENSEMBLE, autoescape=True)) for column in columns))
    for name in connection.execute(query).scalars():
        ensemble, subject = split(name)
        if ensemble is not None:
            ensembles[subject].append(ensemble)
    return ensembles


def _of_ensembles(
    connection: Connection, subject: str, ensembles: Mapping[str, Sequence[str]]
) -> dict[str, ShareAccount]:
    """Returns the shares and usages of a key or group that apply to one ensemble alone, by ensemble."""
    subjects = {ensemble: ensemble_subject(ensemble, subject) for ensemble in sorted(ensembles.get(subject, ()))}
    return {
        ensemble: ShareAccount(share=_share(connection, name), usage=_usage(connection, name))
        for ensemble, name in subjects.items()
    }


def _share(connection: Connection, subject: str) -> Share:
    text = connection.execute(select(shares_table.c.share).where(shares_table.c.subject == subject)).scalar()
    return Share() if text is None else Share.model_validate_json(text)


def _write_share(connection: Connection, subject: str, share: Share) -> None:
    connection.execute(delete(shares_table).where(shares_table.c.subject == subject))
    connection.execute(insert(shares_table).values(subject=subject, share=share.model_dump_json()))


def _usage(connection: Connection, subject: str) -> Usage:
    totals = func.coalesce(func.sum(usage_table.c.spent), 0), func.coalesce(func.sum(usage_table.c.held), 0)
    mine = usage_table.c.subject == subject
    spent, held = connection.execute(select(*totals).where(mine)).one()
    today = connection.execute(select(*totals).where(mine, usage_table.c.day == _today())).one()
    return Usage(spent=int(spent), held=int(held), spent_today=int(today[0]), held_today=int(today[1]))


def _charge(connection: Connection, subject: str, day: str, *, held: int, spent: int = 0) -> None:
    row = (usage_table.c.subject == subject) & (usage_table.c.day == day)
    changes = {"spent": usage_table.c.spent + spent, "held": usage_table.c.held + held}
    if connection.execute(update(usage_table).where(row).values(changes)).rowcount == 0:
        connection.execute(insert(usage_table).values(subject=subject, day=day, spent=spent, held=held))


def _reservation(connection: Connection, id_: str) -> Reservation | None:
    row = connection.execute(select(reservations_table).where(reservations_table.c.id == id_)).mappings().first()
    return _open(row) if row else None


def _open(row: Any) -> Reservation:
    return Reservation(**{**row, "subjects": tuple(json.loads(row["subjects"]))})
