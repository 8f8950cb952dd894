"""What the service says about itself: numbers that do not depend on the private data."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from pydantic import BaseModel
from ray.exceptions import RayError

from services.budget.metrics import LedgerHealth
from services.budget.statement import Statement
from services.coordinator.messages import Unavailable
from services.gateway.errors import unavailable

FRESH_S = 1.0
_LEDGER_TROUBLES: dict[LedgerHealth, str] = {
    "fenced": "another deployment has the ledger; this one charges nothing until that has ended",
    "unavailable": "the ledger's database cannot be read or written",
}


class Shard(BaseModel):
    """One actor that holds part models."""

    name: str
    parts: tuple[int, ...]
    answers: bool
    resident_bytes: int | None


class Status:
    """Asks the named budget, coordinator and fleet actors; `timeout_s` bounds each probe.

    What is left is counted in the tokens of now, or, while no coordinator answers, in those charged last.
    """

    def __init__(
        self,
        namespace: str,
        coordinator_actors: Sequence[str],
        budget_actor: str,
        fleet_actor: str,
        timeout_s: float,
        statement_timeout_s: float,
    ) -> None:
        self._namespace = namespace
        self._coordinators = tuple(coordinator_actors)
        self._budget = budget_actor
        self._fleet = fleet_actor
        self._timeout_s = timeout_s
        self._statement_timeout_s = statement_timeout_s
        self._checking = asyncio.Lock()
        self._fresh_until = 0.0
        self._troubles: dict[str, str] = {}

    async def statement(self) -> Statement:
        """What clients may know of the promise, of what is spent and of what is left.

        Raises:
            ApiError: 503, the budget actor does not answer.
        """
        event = await self._event()
        try:
            statement: Statement = await self._ask(self._budget, "statement", self._statement_timeout_s, event)
        except _SILENCE:
            raise unavailable(f"the actor {self._budget!r} does not answer") from None
        return statement

    async def _event(self) -> str | None:
        """What a token costs now, from the first coordinator that answers."""
        for coordinator in self._coordinators:
            with suppress(*_SILENCE):
                event: str = await self._ask(coordinator, "event", self._timeout_s)
                return event
        return None

    async def shards(self) -> list[Shard]:
        """Every shard's actor, and whether it answers.

        Raises:
            ApiError: 503, the fleet actor does not answer.
        """
        try:
            told = await self._ask(self._fleet, "status", 3 * self._timeout_s)
        except _SILENCE:
            raise unavailable(f"the actor {self._fleet!r} does not answer") from None
        return [Shard.model_validate(shard) for shard in told["shards"]]

    async def troubles(self) -> dict[str, str]:
        """Why no private token can be made and charged now, by the actor that cannot do its work; empty if one can.

        One coordinator that works is enough. All who ask within a second get one answer: probes cost the actors little.
        """
        async with self._checking:
            if time.monotonic() >= self._fresh_until:
                ledger, *coordinators = await asyncio.gather(
                    self._ledgers_trouble(), *map(self._coordinators_trouble, self._coordinators)
                )
                found = dict(zip(self._coordinators, coordinators, strict=True)) if all(coordinators) else {}
                found[self._budget] = ledger
                self._troubles = {actor: trouble for actor, trouble in found.items() if trouble is not None}
                self._fresh_until = time.monotonic() + FRESH_S
            return self._troubles

    async def _coordinators_trouble(self, coordinator: str) -> str | None:
        """What a coordinator says of its steps and of the shards."""
        try:
            await self._ask(coordinator, "health", self._timeout_s)
        except _SILENCE as error:
            cause = getattr(error, "cause", error)
            return str(cause) if isinstance(cause, Unavailable) else self._silence(error)
        return None

    async def _ledgers_trouble(self) -> str | None:
        try:
            health: LedgerHealth = await self._ask(self._budget, "health", self._timeout_s)
        except _SILENCE as error:
            return self._silence(error)
        return _LEDGER_TROUBLES.get(health)

    def _silence(self, error: BaseException) -> str:
        match error:
            case TimeoutError():
                return f"it does not answer within {self._timeout_s:g} s"
            case ValueError():
                return "there is no such actor"
            case _:
                return f"it cannot be asked ({type(error).__name__})"

    async def _ask(self, actor: str, method: str, timeout_s: float, *arguments: object) -> Any:
        if not ray.is_initialized():
            raise RuntimeError("Ray is not initialised")
        async with asyncio.timeout(timeout_s):
            handle = await asyncio.to_thread(ray.get_actor, actor, self._namespace)
            return await getattr(handle, method).remote(*arguments)


# ray.get_actor raises ValueError for a name that no living actor has.
_SILENCE = (RayError, ValueError, RuntimeError, TimeoutError)
