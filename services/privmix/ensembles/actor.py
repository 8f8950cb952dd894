"""Implements the Ray actor that keeps the list of a service's ensembles for gateways and operators."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, TypeVar

import ray
from pydantic import TypeAdapter
from ray.actor import ActorHandle
from sqlalchemy import delete, insert, select

from privmix.database.service import ServiceDatabase, ensembles_table
from privmix.ensembles.records import EnsembleEntry, EnsembleList, ServedEnsemble
from privmix.ensembles.registry import Registry
from privmix.foundation.actors import HEAD, forwarded

NAME = "ensembles"

T = TypeVar("T")

_ENTRIES = TypeAdapter(tuple[EnsembleEntry, ...])


class Ensembles:
    """Owns the `Registry` of a service and stores it in the database. A restarted actor continues from there."""

    def __init__(self, database: str, namespace: str) -> None:
        self._database = ServiceDatabase(database)
        self._namespace = namespace
        self._registry = Registry(self._load())
        self._changing = asyncio.Lock()
        self._begun = asyncio.Event()
        if _is_restarted():
            self._begun.set()

    async def begun(self) -> None:
        """Returns once the list is that of this service, which is when its other actors are ready."""
        await self._begun.wait()

    async def current(self) -> EnsembleList:
        return self._registry.current

    async def _read(self, query: Callable[[Registry], T]) -> T:
        return query(self._registry)

    async def _change(self, change: Callable[[Registry], None]) -> None:
        async with self._changing:
            change(self._registry)
            await asyncio.to_thread(self._save, self._registry.current.entries)
            self._begun.set()

    heartbeat = forwarded(_read, Registry.heartbeat)
    statuses = forwarded(_read, Registry.statuses)
    status = forwarded(_read, Registry.status)
    add = forwarded(_change, Registry.add)
    drain = forwarded(_change, Registry.drain)
    remove = forwarded(_change, Registry.remove)
    replace = forwarded(_change, Registry.replace)
    configure = forwarded(_change, Registry.configure)

    def _load(self) -> tuple[EnsembleEntry, ...]:
        mine = ensembles_table.c.namespace == self._namespace
        with self._database.transaction() as connection:
            text = connection.execute(select(ensembles_table.c.listed).where(mine)).scalar()
        return () if text is None else _ENTRIES.validate_json(text)

    def _save(self, entries: tuple[EnsembleEntry, ...]) -> None:
        # Without defaults, so that a rollback to a version with fewer fields can read it.
        text = _ENTRIES.dump_json(entries, exclude_defaults=True).decode()
        with self._database.transaction() as connection:
            connection.execute(delete(ensembles_table).where(ensembles_table.c.namespace == self._namespace))
            connection.execute(insert(ensembles_table).values(namespace=self._namespace, listed=text))


def _is_restarted() -> bool:
    """Returns whether this process is that of an actor whose earlier process was lost."""
    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)


EnsemblesActor = ray.remote(num_cpus=0, resources=HEAD, max_restarts=-1, max_task_retries=-1)(Ensembles)


def prepare(database: str, *, namespace: str, lifetime: Literal["detached"] | None = None) -> ActorHandle:
    """Creates the ensembles actor and does not wait for its process. `start` gives it its list."""
    options = {"name": NAME, "namespace": namespace, "lifetime": lifetime}
    return EnsemblesActor.options(**options).remote(database, namespace)


def start(
    database: str,
    ensembles: Sequence[ServedEnsemble],
    *,
    namespace: str,
    lifetime: Literal["detached"] | None = None,
    keep: bool = False,
    prepared: ActorHandle | None = None,
) -> ActorHandle:
    """Starts the ensembles actor. Gateways wait for this (`Ensembles.begun`).

    Args:
        ensembles: the configured ensembles.
        keep: reuse a living actor. Its ensembles that are not configured then drain.
        prepared: the result of `prepare`.
    """
    if keep:
        with suppress(ValueError):  # Ray raises it if no such actor exists.
            living = ray.get_actor(NAME, namespace)
            ray.get(living.configure.remote(list(ensembles)))
            return living
    actor = prepared or prepare(database, namespace=namespace, lifetime=lifetime)
    ray.get(actor.replace.remote(list(ensembles)))
    return actor
