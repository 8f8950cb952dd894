"""Finds keys and charges their shares. Every function is a part of its caller's transaction."""

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, delete, insert, or_, select, update

from privmix.database.service import keys_table, reservations_table
from privmix.keys.records import Key


@dataclass(frozen=True)
class Reservation:
    """The tokens that an open request of a key may use. They are charged until the request is settled."""

    id: str
    key: str
    tokens: int
    generations: int
    gateway: str


@dataclass(frozen=True)
class Exhausted:
    """Reports that a share has too little left. If open requests hold a part of it, they may return tokens."""

    held: bool


def find(connection: Connection, hash_: str) -> Key | None:
    """Returns the key whose secret has this hash, valid or not. A rotated secret counts until its grace period ends."""
    table = keys_table.c
    is_previous = (table.previous_hash == hash_) & (table.previous_until > datetime.now(UTC).isoformat())
    row = connection.execute(select(keys_table).where((table.hash == hash_) | is_previous)).mappings().first()
    return None if row is None else Key.of(row)


def are_required(connection: Connection) -> bool:
    """Returns whether a key was ever created. From then on clients need one, even if all were revoked."""
    return connection.execute(select(keys_table.c.id).limit(1)).first() is not None


def reserve(connection: Connection, id_: str, key: str, wanted: int, generations: int, gateway: str) -> int | Exhausted:
    """Charges up to `wanted` tokens to the share of a key, and returns their number. A repeated id is charged once.

    It is `Exhausted` if less than `wanted` is left while open requests hold some of the share, or if nothing is left.
    So only used tokens shorten or refuse a request.
    """
    open_ = opened(connection, id_, key)
    if before := [reservation.tokens for reservation in open_ if reservation.id == id_]:
        return before[0]
    table = keys_table.c
    share = connection.execute(select(table.tokens, table.spent).where(table.id == key)).first()
    granted = wanted
    if share is not None and share.tokens is not None:
        held = sum(each.tokens for each in open_)
        left = max(0, share.tokens - share.spent - held)
        if left < wanted and (held or not left):
            return Exhausted(held=held > 0)
        granted = min(left, wanted)
    connection.execute(insert(reservations_table).values(vars(Reservation(id_, key, granted, generations, gateway))))
    return granted


def settle(connection: Connection, id_: str, used: int | None) -> None:
    """Ends a reservation, once. `used` of its tokens stay charged; all of them if `used` is None, and never more."""
    ended = delete(reservations_table).where(reservations_table.c.id == id_).returning(reservations_table)
    row = connection.execute(ended).mappings().first()
    if row is None:
        return
    spent = row["tokens"] if used is None else min(used, row["tokens"])
    charged = update(keys_table).where(keys_table.c.id == row["key"])
    connection.execute(charged.values(spent=keys_table.c.spent + spent))


def opened(connection: Connection, id_: str | None = None, key: str | None = None) -> list[Reservation]:
    """Returns the open reservations: all, or that with an id and those of a key."""
    query, table = select(reservations_table), reservations_table.c
    if key is not None:
        query = query.where(or_(table.id == id_, table.key == key))
    return [Reservation(**row) for row in connection.execute(query).mappings()]


def spent_ratios(connection: Connection) -> dict[str, float]:
    """Returns the spent fraction of the shares of all keys that are not revoked, by the key's name."""
    table = keys_table.c
    query = select(table.name, table.spent, table.tokens).where(table.revoked.is_(None), table.tokens > 0)
    return {name: spent / tokens for name, spent, tokens in connection.execute(query)}
