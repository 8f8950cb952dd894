"""Reports the status of an ensemble: its privacy statement, shards and health."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Concatenate, ParamSpec, TypeVar

from pydantic import BaseModel
from ray.actor import ActorHandle
from ray.exceptions import RayError

from privmix.budget.actor import NAME as BUDGET
from privmix.budget.actor import Budget
from privmix.budget.metrics import LedgerHealth
from privmix.budget.statement import Statement
from privmix.coordinator.coordinator import Coordinator
from privmix.fleet.fleet import NAME as FLEET
from privmix.fleet.fleet import Fleet
from privmix.foundation.actors import find_actor, remote
from privmix.foundation.errors import CoordinatorUnavailable
from privmix.gateway.errors import unavailable

FRESH_S = 1.0
TIMEOUT_S = 5.0
STATEMENT_TIMEOUT_S = 30.0
"""A statement can take seconds to compute."""

P = ParamSpec("P")
T = TypeVar("T")
ActorCall = Callable[Concatenate[ActorHandle, P], Awaitable[T]]

_LEDGER_TROUBLES: dict[LedgerHealth, str] = {
    "fenced": "another deployment has the ledger; this one cannot charge until the other ends",
    "unavailable": "the ledger's database cannot be read or written",
}


class ShardReport(BaseModel):
    """The status of one actor that runs part models."""

    name: str
    parts: tuple[int, ...]
    answers: bool
    resident_bytes: int | None


class Status:
    """Queries the budget, coordinator and fleet actors of one ensemble. `timeout_s` limits each probe.

    The tokens left are computed with the current cost of a token, or the last charged cost if no coordinator answers.
    """

    def __init__(
        self,
        namespace: str,
        coordinator_actors: Sequence[str],
        timeout_s: float = TIMEOUT_S,
        statement_timeout_s: float = STATEMENT_TIMEOUT_S,
    ) -> None:
        self._namespace = namespace
        self._coordinators = tuple(coordinator_actors)
        self._timeout_s = timeout_s
        self._statement_timeout_s = statement_timeout_s
        self._checking = asyncio.Lock()
        self._fresh_until = 0.0
        self._troubles: dict[str, str] = {}

    async def statement(self) -> Statement:
        """Returns the public statement of the guarantee, the spent budget and the rest.

        Raises:
            ApiError: 503, the budget actor does not answer.
        """
        event = await self._event()
        return await self._answer(BUDGET, self._statement_timeout_s, remote(Budget.statement), event)

    async def _event(self) -> str | None:
        """Returns the current privacy event of a token, from the first coordinator that answers."""
        for coordinator in self._coordinators:
            with suppress(*_CALL_ERRORS):
                return await self._ask(coordinator, self._timeout_s, remote(Coordinator.event))
        return None

    async def shards(self) -> list[ShardReport]:
        """Returns the status of every shard.

        Raises:
            ApiError: 503, the fleet actor does not answer.
        """
        status = await self._answer(FLEET, 3 * self._timeout_s, remote(Fleet.status))
        return [ShardReport.model_validate(shard) for shard in status["shards"]]

    async def troubles(self) -> dict[str, str]:
        """Returns why no private token could be generated and charged with any budget, by actor; empty if one could.

        One working coordinator suffices. Caches the result for a second to limit the load on the actors.
        """
        async with self._checking:
            if time.monotonic() >= self._fresh_until:
                ledger, *coordinators = await asyncio.gather(
                    self._ledger_trouble(), *map(self._coordinator_trouble, self._coordinators)
                )
                troubles = dict(zip(self._coordinators, coordinators, strict=True)) if all(coordinators) else {}
                troubles[BUDGET] = ledger
                self._troubles = {actor: trouble for actor, trouble in troubles.items() if trouble is not None}
                self._fresh_until = time.monotonic() + FRESH_S
            return self._troubles

    async def _coordinator_trouble(self, coordinator: str) -> str | None:
        """Returns why a coordinator cannot work; None if it can. A coordinator also checks its shards."""
        try:
            await self._ask(coordinator, self._timeout_s, remote(Coordinator.health))
        except _CALL_ERRORS as error:
            cause = getattr(error, "cause", error)
            return str(cause) if isinstance(cause, CoordinatorUnavailable) else self._failure(error)
        return None

    async def _ledger_trouble(self) -> str | None:
        """Returns why tokens cannot be charged; None if they can."""
        try:
            health = await self._ask(BUDGET, self._timeout_s, remote(Budget.health))
        except _CALL_ERRORS as error:
            return self._failure(error)
        return _LEDGER_TROUBLES.get(health)

    def _failure(self, error: BaseException) -> str:
        match error:
            case TimeoutError():
                return f"it does not answer within {self._timeout_s:g} s"
            case ValueError():
                return "the actor does not exist"
            case _:
                return f"the call fails ({type(error).__name__})"

    async def _answer(
        self, name: str, timeout_s: float, call: ActorCall[P, T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        try:
            return await self._ask(name, timeout_s, call, *arguments, **named)
        except _CALL_ERRORS:
            raise unavailable(f"the actor {name!r} does not answer") from None

    async def _ask(
        self, name: str, timeout_s: float, call: ActorCall[P, T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        async with asyncio.timeout(timeout_s):
            return await call(await find_actor(name, self._namespace), *arguments, **named)


_CALL_ERRORS = (RayError, ValueError, RuntimeError, TimeoutError)
