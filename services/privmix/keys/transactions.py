"""Applies the operations of many requests in one transaction, with as many statements as for one request."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, case, delete, func, insert, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from privmix.database.clock import now
from privmix.database.service import keys_table, reservations_table, shares_table, usage_table
from privmix.keys.records import Key, Share, ShareLimit, ShareUsage


@dataclass(frozen=True)
class Find:
    """Asks for the key of a secret with this hash. The result is a `Key`, valid or not, or None.

    A rotated secret counts until its grace period ends.
    """

    hash: str


@dataclass(frozen=True)
class AreRequired:
    """Asks whether a key was ever created. The result is a bool."""


@dataclass(frozen=True)
class ReadShares:
    """Asks for the shares of subjects. The result is a dictionary."""

    subjects: tuple[str, ...]


@dataclass(frozen=True)
class Reserve:
    """Charges up to `wanted` tokens to all `subjects`. The result is `Reserved`, `Wait` or `Exhausted`.

    It is `Wait` if a share has less than `wanted` left while running requests hold some of it, because these may return
    tokens. So only used tokens shorten or refuse a request. A repeated id has the same reservation.
    """

    id: str
    subjects: tuple[str, ...]
    wanted: int
    generations: int
    gateway: str


@dataclass(frozen=True)
class Settle:
    """Ends a reservation. `used` of its tokens stay charged; all of them if `used` is None, and never more.

    The result is the `OpenReservation`, or None if it was settled before.
    """

    id: str
    used: int | None


Operation = Find | AreRequired | ReadShares | Reserve | Settle


@dataclass(frozen=True)
class Reserved:
    """Reports a new reservation: `tokens` are charged to the shares until `Settle` corrects the number."""

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
    limit: ShareLimit


@dataclass(frozen=True)
class OpenReservation:
    """Holds a reservation whose request has not ended."""

    id: str
    subjects: tuple[str, ...]
    day: str
    tokens: int
    generations: int
    gateway: str


def apply(connection: Connection, operations: Sequence[Operation]) -> list[Any]:
    """Applies operations in their order, inside the caller's transaction, and returns their results."""
    reserving = [operation for operation in operations if isinstance(operation, Reserve)]
    charged = {subject for operation in reserving for subject in operation.subjects}
    read = {name for operation in operations if isinstance(operation, ReadShares) for name in operation.subjects}
    state = _State(
        day=today(),
        keys=_keys(connection, {operation.hash for operation in operations if isinstance(operation, Find)}),
        required=AreRequired() in operations and are_required(connection),
        shares=shares(connection, charged | read),
        usages=usages(connection, charged),
        open=_open(connection, {operation.id for operation in operations if isinstance(operation, Reserve | Settle)}),
    )
    results = [state.result(operation) for operation in operations]
    state.write(connection)
    return results


@dataclass
class _State:
    """Holds what the operations of one transaction read, and the changes that they make."""

    day: str
    keys: dict[str, Key]
    required: bool
    shares: dict[str, Share]
    usages: dict[str, ShareUsage]
    open: dict[str, OpenReservation]
    stored: frozenset[str] = frozenset()
    changes: defaultdict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def __post_init__(self) -> None:
        self.stored = frozenset(self.open)

    def result(self, operation: Operation) -> Any:
        match operation:
            case Find():
                return self.keys.get(operation.hash)
            case AreRequired():
                return self.required
            case ReadShares():
                return {subject: self.shares.get(subject, Share()) for subject in operation.subjects}
            case Reserve():
                return self._reserve(operation)
            case Settle():
                return self._settle(operation)

    def _reserve(self, operation: Reserve) -> Reserved | Wait | Exhausted:
        if (before := self.open.get(operation.id)) is not None:
            return Reserved(before.id, before.tokens)
        granted, exhausted = operation.wanted, None
        for subject in operation.subjects:
            share, usage = self.shares.get(subject, Share()), self.usages.get(subject, ShareUsage())
            limits: tuple[tuple[ShareLimit, int | None, int, int], ...] = (
                ("tokens", share.tokens, usage.charged, usage.held),
                ("tokens_per_day", share.tokens_per_day, usage.spent_today + usage.held_today, usage.held_today),
            )
            for limit, allowed, charged, held in limits:
                if allowed is None or (left := allowed - charged) >= operation.wanted:
                    continue
                if held:
                    return Wait(subject)
                if left < granted:
                    granted, exhausted = max(left, 0), Exhausted(subject, limit)
        if granted == 0 and exhausted is not None:
            return exhausted
        self.open[operation.id] = OpenReservation(
            operation.id, operation.subjects, self.day, granted, operation.generations, operation.gateway
        )
        self._charge(operation.subjects, self.day, spent=0, held=granted)
        return Reserved(operation.id, granted)

    def _settle(self, operation: Settle) -> OpenReservation | None:
        reservation = self.open.pop(operation.id, None)
        if reservation is not None:
            spent = reservation.tokens if operation.used is None else min(operation.used, reservation.tokens)
            self._charge(reservation.subjects, reservation.day, spent=spent, held=-reservation.tokens)
        return reservation

    def _charge(self, subjects: Iterable[str], day: str, *, spent: int, held: int) -> None:
        for subject in subjects:
            change = self.changes[subject, day]
            change[0] += spent
            change[1] += held
            usage, is_today = self.usages.get(subject, ShareUsage()), day == self.day
            self.usages[subject] = ShareUsage(
                spent=usage.spent + spent,
                held=usage.held + held,
                spent_today=usage.spent_today + spent * is_today,
                held_today=usage.held_today + held * is_today,
            )

    def write(self, connection: Connection) -> None:
        if ended := self.stored - self.open.keys():
            connection.execute(delete(reservations_table).where(reservations_table.c.id.in_(ended)))
        if begun := [self.open[id_] for id_ in self.open.keys() - self.stored]:
            rows = [{**vars(reservation), "subjects": json.dumps(reservation.subjects)} for reservation in begun]
            connection.execute(insert(reservations_table), rows)
        if self.changes:
            dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
            upsert = dialect.insert(usage_table)
            added = {name: usage_table.c[name] + upsert.excluded[name] for name in ("spent", "held")}
            connection.execute(
                upsert.on_conflict_do_update(index_elements=["subject", "day"], set_=added),
                [
                    {"subject": subject, "day": day, "spent": spent, "held": held}
                    for (subject, day), (spent, held) in sorted(self.changes.items())
                ],
            )


def today() -> str:
    """Returns the day that is charged now, in UTC."""
    return now().date().isoformat()


def shares(connection: Connection, subjects: Iterable[str] | None = None) -> dict[str, Share]:
    """Returns the shares of these subjects, or all shares. A subject without a share is missing."""
    query = select(shares_table.c.subject, shares_table.c.share)
    if subjects is not None:
        if not (subjects := set(subjects)):
            return {}
        query = query.where(shares_table.c.subject.in_(subjects))
    return {subject: Share.model_validate_json(text) for subject, text in connection.execute(query)}


def usages(connection: Connection, subjects: Iterable[str] | None = None) -> dict[str, ShareUsage]:
    """Returns the usages of these subjects, or of all. A subject that used nothing is missing."""
    table, is_today = usage_table.c, usage_table.c.day == today()
    sums = [
        func.coalesce(func.sum(column), 0)
        for column in (
            table.spent,
            table.held,
            case((is_today, table.spent), else_=0),
            case((is_today, table.held), else_=0),
        )
    ]
    query = select(table.subject, *sums).group_by(table.subject)
    if subjects is not None:
        if not (subjects := set(subjects)):
            return {}
        query = query.where(table.subject.in_(subjects))
    return {
        subject: ShareUsage(spent=int(spent), held=int(held), spent_today=int(spent_today), held_today=int(held_today))
        for subject, spent, held, spent_today, held_today in connection.execute(query)
    }


def reservations(connection: Connection) -> list[OpenReservation]:
    """Returns all reservations that are not settled."""
    return [_reservation(row) for row in connection.execute(select(reservations_table)).mappings()]


def are_required(connection: Connection) -> bool:
    """Returns whether a key was ever created. From then on clients need one, even if all were revoked."""
    return connection.execute(select(keys_table.c.id).limit(1)).first() is not None


def key_of(row: Any) -> Key:
    values = {name: row[name] for name in Key.model_fields}
    return Key.model_validate({**values, "scopes": json.loads(row["scopes"])})


def _keys(connection: Connection, hashes: set[str]) -> dict[str, Key]:
    """Returns the keys by the hashes of their secrets. A rotated secret counts until its grace period ends."""
    if not hashes:
        return {}
    table = keys_table.c
    query = select(keys_table).where(or_(table.hash.in_(hashes), table.previous_hash.in_(hashes)))
    found: dict[str, Key] = {}
    at = now().isoformat()
    for row in connection.execute(query).mappings():
        key = key_of(row)
        if row["previous_hash"] in hashes and row["previous_until"] > at:
            found.setdefault(row["previous_hash"], key)
        if row["hash"] in hashes:
            found[row["hash"]] = key
    return found


def _open(connection: Connection, ids: set[str]) -> dict[str, OpenReservation]:
    if not ids:
        return {}
    query = select(reservations_table).where(reservations_table.c.id.in_(ids))
    return {row["id"]: _reservation(row) for row in connection.execute(query).mappings()}


def _reservation(row: Any) -> OpenReservation:
    return OpenReservation(**{**row, "subjects": tuple(json.loads(row["subjects"]))})
