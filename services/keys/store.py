"""Keys, shares and what was charged to them. Every method is one transaction; what it returns is on disk."""

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
from services.keys.subjects import OF_ENSEMBLE, group_subject, split, subject_of, within

Limit = Literal["tokens", "tokens_per_day"]


@dataclass(frozen=True)
class Reserved:
    """`tokens` are charged to the shares until `settle` says how many of them were used."""

    id: str
    tokens: int


@dataclass(frozen=True)
class Wait:
    """The share of `subject` may have more once requests that hold some of it have ended."""

    subject: str


@dataclass(frozen=True)
class Exhausted:
    """The share of `subject` has nothing left, and no running request holds any of it."""

    subject: str
    limit: Limit


@dataclass(frozen=True)
class Open:
    """A reservation whose request has not ended."""

    id: str
    subjects: tuple[str, ...]
    tokens: int
    generations: int
    gateway: str


class KeyStore:
    """Owns the tables. Several processes may open one: the service, and `privmix keys` beside it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def required(self) -> bool:
        """Whether there has ever been a key; from then on clients must show one, even when all were revoked."""
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
        """Make a key. Its secret is returned this once, and stored as a hash only.

        Raises:
            KeysError: the name is taken.
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
                _write_share(connection, subject_of(key), share or Share())
        except IntegrityError as error:
            raise KeysError(f"name: there is a key named {name!r} already; take another name") from error
        return key, secret

    def find(self, hash_: str) -> Key | None:
        """The key of a secret with this hash, valid or not; a rotated secret counts until its grace ends."""
        current = keys_table.c.hash == hash_
        previous = (keys_table.c.previous_hash == hash_) & (keys_table.c.previous_until > now().isoformat())
        with self._database.transaction() as connection:
            row = connection.execute(select(keys_table).where(or_(current, previous))).mappings().first()
        return _key(row) if row else None

    def accounts(self) -> list[KeyAccount]:
        """Every key, the oldest first."""
        with self._database.transaction() as connection:
            rows = connection.execute(select(keys_table).order_by(keys_table.c.created)).mappings().all()
            ensembles = _ensembles(connection)
            return [_account(connection, _key(row), ensembles) for row in rows]

    def account(self, id_or_name: str) -> KeyAccount:
        """
        Raises:
            UnknownKey: there is none.
        """
        with self._database.transaction() as connection:
            return _account(connection, _named(connection, id_or_name), _ensembles(connection))

    def usages(self) -> dict[str, Usage]:
        """What was charged, by subject: keys, groups, and what the configuration's keys used."""
        with self._database.transaction() as connection:
            subjects = connection.execute(select(usage_table.c.subject).distinct()).scalars().all()
            return {subject: _usage(connection, subject) for subject in subjects}

    def limit(self, id_or_name: str, share: Share, ensemble: str | None = None) -> KeyAccount:
        """Replace the share of a key: of all ensembles together, or of one.

        Raises:
            UnknownKey: there is none.
        """
        with self._database.transaction() as connection:
            key = _named(connection, id_or_name)
            _write_share(connection, _in(ensemble, subject_of(key)), share)
            return _account(connection, key, _ensembles(connection))

    def limit_group(self, group: str, share: Share, ensemble: str | None = None) -> None:
        """Replace the share of a group of keys: of all ensembles together, or of one."""
        with self._database.transaction() as connection:
            _write_share(connection, _in(ensemble, group_subject(group)), share)

    def rotate(self, id_or_name: str, grace: timedelta = timedelta()) -> tuple[Key, Secret]:
        """Give a key another secret; the present one goes on for `grace`.

        Raises:
            UnknownKey: there is none.
            KeysError: it was revoked.
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
        """Refuse a key from now on, for good. Its usage stays.

        Raises:
            UnknownKey: there is none.
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
        """The share of each subject."""
        with self._database.transaction() as connection:
            return {subject: _share(connection, subject) for subject in subjects}

    def reserve(
        self, id_: str, subjects: Sequence[str], wanted: int, generations: int, gateway: str
    ) -> Reserved | Wait | Exhausted:
        """Charge up to `wanted` tokens to all of `subjects`: fewer only if no more can be had by waiting.

        A share that has less left than `wanted` while requests hold some of it answers `Wait`, because these may give
        back. So a request is cut short, or refused, only by what was really used. Asked again under one id, it answers
        as before.
        """
        day = _today()
        with self._database.transaction() as connection:
            if (before := _reservation(connection, id_)) is not None:
                return Reserved(id_, before.tokens)
            granted = wanted
            ends: Exhausted | None = None
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
                        granted, ends = max(left, 0), Exhausted(subject, limit)  # type: ignore[arg-type]
            if granted == 0 and ends is not None:
                return ends
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

    def settle(self, id_: str, used: int | None) -> Open | None:
        """End a reservation: `used` of its tokens stay charged, all of them if it is not known how many were.

        Returns it, or None where it had ended before.
        """
        with self._database.transaction() as connection:
            row = (
                connection.execute(select(reservations_table).where(reservations_table.c.id == id_)).mappings().first()
            )
            if row is None:
                return None
            reservation = _open(row)
            spent = reservation.tokens if used is None else min(used, reservation.tokens)
            for subject in reservation.subjects:
                _charge(connection, subject, row["day"], held=-reservation.tokens, spent=spent)
            connection.execute(delete(reservations_table).where(reservations_table.c.id == id_))
        return reservation

    def open_reservations(self) -> list[Open]:
        """All that have not been settled."""
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
        raise UnknownKey(f"there is no key {id_or_name!r}; `privmix keys list` shows those that there are")
    return _key(row)


def _in(ensemble: str | None, subject: str) -> str:
    return subject if ensemble is None else within(ensemble, subject)


def _account(connection: Connection, key: Key, ensembles: Mapping[str, Sequence[str]]) -> KeyAccount:
    own = subject_of(key)
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
    """The ensembles of which each key and group has a share, or used something, apart from the others."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    columns = (shares_table.c.subject, usage_table.c.subject)
    query = union(*(select(column).where(column.startswith(OF_ENSEMBLE, autoescape=True)) for column in columns))
    for each in connection.execute(query).scalars():
        ensemble, subject = split(each)
        if ensemble is not None:
            found[subject].append(ensemble)
    return found


def _of_ensembles(
    connection: Connection, subject: str, ensembles: Mapping[str, Sequence[str]]
) -> dict[str, ShareAccount]:
    """By ensemble, what a key or a group has and used of it alone."""
    subjects = {ensemble: within(ensemble, subject) for ensemble in sorted(ensembles.get(subject, ()))}
    return {
        ensemble: ShareAccount(share=_share(connection, each), usage=_usage(connection, each))
        for ensemble, each in subjects.items()
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


def _reservation(connection: Connection, id_: str) -> Open | None:
    row = connection.execute(select(reservations_table).where(reservations_table.c.id == id_)).mappings().first()
    return _open(row) if row else None


def _open(row: Any) -> Open:
    return Open(row["id"], tuple(json.loads(row["subjects"])), row["tokens"], row["generations"], row["gateway"])
