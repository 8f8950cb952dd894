"""Where a coordinator pays for tokens whose cost is known only once they are made."""

from collections.abc import Sequence
from uuid import uuid4

from ray.actor import ActorHandle

from services import tracing
from services.privacy.events import Event


class Till:
    """Charges measured losses, durably, before any of their tokens leaves.

        till = Till(ray.get_actor(NAME, namespace))
        if await till.is_open():
            granted = await till.charge(event, losses)  # release the first so many tokens, and no other

    Once it has granted fewer than asked it stays closed.
    """

    def __init__(self, budget: ActorHandle) -> None:
        self._budget = budget
        self._open: bool | None = None

    async def is_open(self) -> bool:
        """Whether there may be budget left.

        Raises:
            LedgerError, ray.exceptions.RayError: nobody knows.
        """
        if self._open is None:
            self._open = not await self._budget.stopped.remote()
        return self._open

    async def charge(self, event: Event, losses: Sequence[Sequence[float]]) -> int:
        """How many of the first of these tokens are paid for; see `Ledger.charge`.

        Raises:
            LedgerError, ray.exceptions.RayError: none may be released.
        """
        # Named by us, so that Ray may send it again to a restarted actor and nothing is charged twice.
        trace = tracing.traceparent()
        granted: int = await self._budget.charge.remote(event.to_json(), losses, uuid4().hex, trace)
        self._open = granted == len(losses)
        return granted
