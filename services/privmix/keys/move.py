"""Moves the service's database beside a ledger that moves, because by default its place follows the ledger's."""

from pathlib import Path

from sqlalchemy import delete, func, insert, select

from privmix.database.service import ServiceDatabase, default_database, keys_table, metadata, service_table
from privmix.foundation.errors import KeysError

_BATCH = 1_000


def moved_database(source: str, target: str) -> tuple[str, str] | None:
    """Returns the default places of the keys of a ledger at `source` and at `target`.

    Returns None if nothing has to move: the places are the same, or the first one has no keys.

    Raises:
        KeysError: the second place has other keys.
    """
    here, there = default_database(source), default_database(target)
    if here == there or not _exists(here):
        return None
    ids = _ids(here)
    if not ids:
        return None
    if _exists(there) and (others := _ids(there)):
        if others == ids:
            return None  # an earlier call has moved them
        raise KeysError(
            f"keys: {ServiceDatabase(there).name} has other keys than those beside the ledger; set keys.database to "
            "the place of the ones to use, and move the ledger with --keys-stay"
        )
    return here, there


def move_keys(here: str, there: str) -> int:
    """Copies keys, shares, usage, batches and alerts to a database without keys. Returns the number of keys.

    The copy is one transaction. The original stays, unused. The contents of files stay where they are.

    Raises:
        KeysUnavailable: one of the databases failed; nothing was copied.
    """
    source, target = ServiceDatabase(here, create=False, copies=True), ServiceDatabase(there, copies=True)
    with source.transaction() as leaving, target.transaction() as arriving:
        arriving.execute(delete(service_table))  # the copy keeps the id, by which it finds the contents of its files
        for table in metadata.sorted_tables:
            for rows in leaving.execute(select(table)).mappings().partitions(_BATCH):
                arriving.execute(insert(table), [dict(row) for row in rows])
        return int(arriving.execute(select(func.count()).select_from(keys_table)).scalar_one())


def _exists(place: str) -> bool:
    return "://" in place or Path(place).exists()


def _ids(place: str) -> set[str]:
    with ServiceDatabase(place).transaction() as connection:
        return set(connection.execute(select(keys_table.c.id)).scalars())
