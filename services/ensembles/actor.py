"""The ensembles actor: keeps the list of a service's ensembles for gateways and operators."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, TypeVar

import ray
from pydantic import TypeAdapter
from ray.actor import ActorHandle
from sqlalchemy import delete, insert, select

from services.ensembles.records import Account, Ensemble, Listed, View
from services.ensembles.register import Register
from services.keys.database import Database, ensembles_table

NAME = "ensembles"

T = TypeVar("T")

_LISTED = TypeAdapter(tuple[Listed, ...])


class Ensembles:
    """Owns the `Register` of a service. It is kept in the database, from which an actor that is made again goes on."""

    def __init__(self, database: str, namespace: str) -> None:
        self._database = Database(database)
        self._namespace = namespace
        self._register = Register(self._load())
        self._changing = asyncio.Lock()

    async def look(self, gateway: str, version: int, live: Mapping[str, int]) -> View:
        """See `Register.look`."""
        return self._register.look(gateway, version, live)

    async def view(self) -> View:
        return self._register.view

    async def accounts(self) -> list[Account]:
        """See `Register.accounts`."""
        return self._register.accounts()

    async def account(self, name: str) -> Account:
        """See `Register.account`."""
        return self._register.account(name)

    async def add(self, ensemble: Ensemble) -> None:
        """See `Register.add`."""
        await self._change(lambda: self._register.add(ensemble))

    async def drain(self, name: str) -> None:
        """See `Register.drain`."""
        await self._change(lambda: self._register.drain(name))

    async def remove(self, name: str) -> None:
        """See `Register.remove`."""
        await self._change(lambda: self._register.remove(name))

    async def replace(self, ensembles: Sequence[Ensemble]) -> None:
        """See `Register.replace`."""
        await self._change(lambda: self._register.replace(ensembles))

    async def configure(self, ensembles: Sequence[Ensemble]) -> None:
        """See `Register.configure`."""
        await self._change(lambda: self._register.configure(ensembles))

    async def _change(self, change: Callable[[], None]) -> None:
        async with self._changing:
            change()
            await asyncio.to_thread(self._save, self._register.view.listed)

    def _load(self) -> tuple[Listed, ...]:
        mine = ensembles_table.c.namespace == self._namespace
        with self._database.transaction() as connection:
            text = connection.execute(select(ensembles_table.c.listed).where(mine)).scalar()
        return () if text is None else _LISTED.validate_json(text)

    def _save(self, listed: tuple[Listed, ...]) -> None:
        text = _LISTED.dump_json(listed).decode()
        with self._database.transaction() as connection:
            connection.execute(delete(ensembles_table).where(ensembles_table.c.namespace == self._namespace))
            connection.execute(insert(ensembles_table).values(namespace=self._namespace, listed=text))


EnsemblesActor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Ensembles)


def start(
    database: str,
    ensembles: Sequence[Ensemble],
    *,
    namespace: str,
    lifetime: Literal["detached"] | None = None,
    keep: bool = False,
) -> ActorHandle:
    """Start the actor under its name.

    Args:
        ensembles: those of the configuration.
        keep: take the actor that lives already, if there is one; the ensembles that it has besides then drain.
    """
    if keep:
        with suppress(ValueError):  # there is none
            living = ray.get_actor(NAME, namespace)
            ray.get(living.configure.remote(list(ensembles)))
            return living
    options = {"name": NAME, "namespace": namespace, "lifetime": lifetime}
    actor = EnsemblesActor.options(**options).remote(database, namespace)
    ray.get(actor.replace.remote(list(ensembles)))
    return actor
