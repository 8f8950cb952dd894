"""What the service says about itself: numbers that do not depend on the private data."""

import asyncio
from typing import Any

import ray
from ray.exceptions import RayError

from services.budget.statement import Statement
from services.gateway.errors import unavailable


class Status:
    """Asks the named budget and coordinator actors; `timeout_s` bounds each probe.

    A statement may take longer than a probe, since it composes privacy loss distributions. What is left is counted in
    the tokens of now, or, while the coordinator does not answer, in those charged last.
    """

    def __init__(
        self, namespace: str, coordinator_actor: str, budget_actor: str, timeout_s: float, statement_timeout_s: float
    ) -> None:
        self._namespace = namespace
        self._coordinator = coordinator_actor
        self._budget = budget_actor
        self._timeout_s = timeout_s
        self._statement_timeout_s = statement_timeout_s

    async def statement(self) -> Statement:
        """What clients may know of the promise, of what is spent and of what is left.

        Raises:
            ApiError: 503, the budget actor does not answer.
        """
        try:
            event = await self._ask(self._coordinator, "event", self._timeout_s)
        except _SILENCE:
            event = None
        try:
            statement: Statement = await self._ask(self._budget, "statement", self._statement_timeout_s, event)
        except _SILENCE:
            raise unavailable(f"the actor {self._budget!r} does not answer") from None
        return statement

    async def missing(self) -> list[str]:
        """The names of the actors that do not answer."""
        probes = {self._coordinator: "health", self._budget: "ready"}
        asked = (self._ask(actor, method, self._timeout_s) for actor, method in probes.items())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [actor for actor, answer in zip(probes, answers, strict=True) if isinstance(answer, BaseException)]

    async def _ask(self, actor: str, method: str, timeout_s: float, *arguments: object) -> Any:
        if not ray.is_initialized():
            raise RuntimeError("Ray is not initialised")
        async with asyncio.timeout(timeout_s):
            handle = await asyncio.to_thread(ray.get_actor, actor, self._namespace)
            return await getattr(handle, method).remote(*arguments)


# ray.get_actor raises ValueError for a name that no living actor has.
_SILENCE = (RayError, ValueError, RuntimeError, TimeoutError)
