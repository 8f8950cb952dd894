"""Finds keys and charges their shares. Every function is a part of its caller's transaction."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, case, delete, func, insert, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from privmix.database.clock import now
from privmix.database.service import keys_table, reservations_table, usage_table
from privmix.keys.records import Key, ShareLimit


@dataclass(frozen=True)
class Reservation:
    """The tokens that an open request of a key may use. They are charged until the request is settled."""

    id: str
    key: str
    day: str
    tokens: int
    generations: int
    gateway: str


@dataclass(frozen=True)
class Exhausted:
    """Reports that a limit of a share leaves too little. If open requests hold a part of it, they may return tokens."""

    limit: ShareLimit
    held: bool


def find(connection: Connection, hash_: str) -> Key | None:
    """Returns the key whose secret has this hash, valid or not. A rotated secret counts until its grace period ends."""
    table = keys_table.c
    is_previous = (table.previous_hash == hash_) & (table.previous_until > now().isoformat())
    row = connection.execute(select(keys_table).where((table.hash == hash_) | is_previous)).mappings().first()
    return None if row is None else Key.of(row)


def are_required(connection: Connection) -> bool:
    """Returns whether a key was ever created. From then on clients need one, even if all were revoked."""
    return connection.execute(select(keys_table.c.id).limit(1)).first() is not None


def reserve(connection: Connection, id_: str, key: str, wanted: int, generations: int, gateway: str) -> int | Exhausted:
    """Charges up to `wanted` tokens to the share of a key, and returns their number. A repeated id is charged once.

    It is `Exhausted` if a limit leaves less than `wanted` while open requests hold some of it, or if it leaves nothing.
    So only used tokens shorten or refuse a request.
    """
    day = today()
    open_ = opened(connection, id_, key)
    if before := [reservation.tokens for reservation in open_ if reservation.id == id_]:
        return before[0]
    granted, exhausted = wanted, None
    for limit, allowed, spent in _limits(connection, key, day):
        held = sum(each.tokens for each in open_ if limit == "tokens" or each.day == day)
        left = allowed - spent - held
        if left < wanted and held:
            return Exhausted(limit, held=True)
        if left < granted:
            granted, exhausted = max(left, 0), Exhausted(limit, held=False)
    if exhausted is not None and granted == 0:
        return exhausted
    connection.execute(
        insert(reservations_table).values(vars(Reservation(id_, key, day, granted, generations, gateway)))
    )
    return granted


def settle(connection: Connection, id_: str, used: int | None) -> None:
    """Ends a reservation, once. `used` of its tokens stay charged; all of them if `used` is None, and never more."""
    ended = delete(reservations_table).where(reservations_table.c.id == id_).returning(reservations_table)
    row = connection.execute(ended).mappings().first()
    if row is None:
        return
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    spent = row["tokens"] if used is None else min(used, row["tokens"])
    charge = dialect.insert(usage_table).values(key=row["key"], day=row["day"], spent=spent)
    added = {"spent": usage_table.c.spent + charge.excluded.spent}
    connection.execute(charge.on_conflict_do_update(index_elements=["key", "day"], set_=added))


def opened(connection: Connection, id_: str | None = None, key: str | None = None) -> list[Reservation]:
    """Returns the open reservations: all, or that with an id and those of a key."""
    query, table = select(reservations_table), reservations_table.c
    if key is not None:
        query = query.where(or_(table.id == id_, table.key == key))
    return [Reservation(**row) for row in connection.execute(query).mappings()]


def today() -> str:
    """Returns the day that is charged now, in UTC."""
    return now().date().isoformat()


def spent_ratios(connection: Connection) -> dict[tuple[str, ShareLimit], float]:
    """Returns the spent fraction of each limit of the shares of all keys that are not revoked, by name and limit."""
    table = keys_table.c
    spent_of_key = sums(usage_table.c.spent, today())
    query = select(table.name, table.tokens, table.tokens_per_day, *spent_of_key).where(table.revoked.is_(None))
    joined = query.outerjoin_from(keys_table, usage_table, usage_table.c.key == table.id).group_by(table.id)
    ratios: dict[tuple[str, ShareLimit], float] = {}
    for name, tokens, tokens_per_day, spent, spent_today in connection.execute(joined):
        if tokens:
            ratios[name, "tokens"] = int(spent) / tokens
        if tokens_per_day:
            ratios[name, "tokens_per_day"] = int(spent_today) / tokens_per_day
    return ratios


def _limits(connection: Connection, key: str, day: str) -> Sequence[tuple[ShareLimit, int, int]]:
    """Returns the limits of a key's share: name, tokens allowed, and tokens spent."""
    table = keys_table.c
    allowed = connection.execute(select(table.tokens, table.tokens_per_day).where(table.id == key)).first()
    if allowed is None or allowed == (None, None):
        return []
    used = connection.execute(select(*sums(usage_table.c.spent, day)).where(usage_table.c.key == key)).one()
    names: tuple[ShareLimit, ShareLimit] = ("tokens", "tokens_per_day")
    return [(name, most, int(own)) for name, most, own in zip(names, allowed, used, strict=True) if most is not None]


def sums(tokens: ColumnElement[int], day: str) -> list[ColumnElement[int]]:
    """Returns the sums of a table's column of tokens, ever and on this day. The table has a column `day`."""
    of_day = case((tokens.table.c.day == day, tokens), else_=0)
    return [func.coalesce(func.sum(column), 0) for column in (tokens, of_day)]
