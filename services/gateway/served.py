"""The ensembles that a gateway serves, by model name."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from uuid import uuid4

import ray
from ray.exceptions import RayError

from services.ensembles.records import Ensemble, EnsembleEntry, EnsembleList, State
from services.gateway.errors import draining, model_not_found
from services.gateway.hub import Hub
from services.gateway.prompts import Prompts
from services.gateway.seen import SeenRequests
from services.gateway.settings import GatewaySettings
from services.gateway.status import Status
from services.keys.messages import TrafficUpdate

LOOK_S = 1.0
ASK_S = 10.0

_log = logging.getLogger(__name__)


class Served:
    """One ensemble: its tokenizer, the channels to its coordinators, and its status."""

    def __init__(self, ensemble: Ensemble, prompts: Prompts, hub: Hub, status: Status) -> None:
        self.ensemble = ensemble
        self.prompts = prompts
        self.hub = hub
        self.status = status
        self.state: State = "serving"
        self._requests = 0

    @classmethod
    def of(cls, ensemble: Ensemble, settings: GatewaySettings) -> "Served":
        """Load what a gateway needs of an ensemble. Takes seconds: reads the tokenizer.

        Raises:
            OSError, ValueError: the model directory has no tokenizer that can be used.
        """
        hub = Hub(ensemble.namespace, ensemble.coordinators, ensemble.stall_timeout_s, ensemble.recovery_s)
        status = Status(
            ensemble.namespace,
            ensemble.coordinators,
            ensemble.budget,
            ensemble.fleet,
            settings.health_timeout_s,
            settings.statement_timeout_s,
        )
        return cls(ensemble, prompts_of(ensemble.model), hub, status)

    @property
    def live(self) -> int:
        """How much is under way: requests, or generations whose client has left and that have not ended."""
        return max(self._requests, self.hub.live)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request until the context is left.

        Raises:
            ApiError: 503, the ensemble takes no new ones.
        """
        if self.state == "draining":
            raise draining(self.ensemble.name)
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1


class Models:
    """The ensembles of this service. It follows the list that the ensembles actor keeps, so gateways need no restart.

    Attributes:
        seen: counts of requests to all ensembles.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.seen = SeenRequests()
        self._settings = settings
        self._gateway = uuid4().hex
        self._version = 0
        self._served: dict[Ensemble, Served] = {}
        self._open: dict[Ensemble, AsyncExitStack] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve the present ensembles, and follow changes of the list until the context is left."""
        current = await self._heartbeat()
        if current is None:
            await self.serve([EnsembleEntry(ensemble=ensemble) for ensemble in self._settings.ensembles])
        elif await self.serve(current.entries):
            self._version = current.version
        following = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
            await self.serve(())

    @property
    def all(self) -> list[Served]:
        """In the order of the service's list."""
        return list(self._served.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Every model name, also the other names of an ensemble."""
        return tuple(name for served in self.all for name in served.ensemble.names)

    def named(self, name: str | None) -> Served:
        """The ensemble of a model name; None is the first.

        Raises:
            ApiError: 404, there is none.
        """
        for served in self.all:
            if name is None or name in served.ensemble.names:
                return served
        raise model_not_found(self.names)

    def heartbeat(self) -> TrafficUpdate:
        """Return the counts since the last call."""
        return self.seen.take({each.ensemble.name: each.hub.seen.take(each.hub.live) for each in self.all})

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            current = await self._heartbeat()
            if current is None or current.version == self._version:
                continue
            if await self.serve(current.entries):
                self._version = current.version

    async def _heartbeat(self) -> EnsembleList | None:
        """Report the live requests, and return the list of ensembles; None where the actor does not answer."""
        name = self._settings.ensembles_actor
        if name is None or not ray.is_initialized():
            return None
        live = {each.ensemble.name: each.live for each in self.all}
        with suppress(RayError, ValueError, RuntimeError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                actor = await asyncio.to_thread(ray.get_actor, name, self._settings.namespace)
                current: EnsembleList = await actor.heartbeat.remote(self._gateway, self._version, live)
                return current
        return None

    async def serve(self, entries: Sequence[EnsembleEntry]) -> bool:
        """Serves exactly these ensembles. Returns False if one of them could not be opened."""
        states = {entry.ensemble: entry.state for entry in entries}
        for ensemble in [ensemble for ensemble in self._open if ensemble not in states]:
            del self._served[ensemble]
            await self._open.pop(ensemble).aclose()
        opened = [ensemble in self._open or await self._opened(ensemble, states[ensemble]) for ensemble in states]
        self._served = {each: self._served[each] for each in states if each in self._served}
        for ensemble, served in self._served.items():
            served.state = states[ensemble]
        return all(opened)

    async def _opened(self, ensemble: Ensemble, state: State) -> bool:
        try:
            served = await asyncio.to_thread(Served.of, ensemble, self._settings)
        except Exception as error:  # whatever is wrong with one, the others go on
            _log.error("the tokenizer of %s cannot be read from %s: %r", ensemble.name, ensemble.model, error)
            return False
        served.state = state
        stack = AsyncExitStack()
        await stack.enter_async_context(served.hub.running())
        self._served[ensemble], self._open[ensemble] = served, stack
        return True


@cache
def prompts_of(model: Path) -> Prompts:
    """Ensembles of one base model share its tokenizer."""
    return Prompts.load(model)
