"""Implements the Ray actor that owns the shards: it starts and ends them, and sends the coordinators the shard map."""

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import ray
from ray._private.state import actors
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util import list_named_actors

from privmix.fleet.plan import START_TIMEOUT_S, ShardPlan, numbers_of
from privmix.fleet.shard_map import PartGroup, ShardMap, Size
from privmix.fleet.size import StoredSize
from privmix.foundation.actors import HEAD
from privmix.foundation.errors import FleetError, KeysUnavailable
from privmix.foundation.metrics import EnsembleMetrics
from privmix.foundation.periodic import periodically
from privmix.privacy.events import Accountant
from privmix.privacy.protocol import Protocol
from privmix.privacy.settings import Settings
from privmix.shards.shard import ShardActor, ShardStatus

NAME = "fleet"
PROBE_S = 5.0
WATCH_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Holds the settings of the fleet. They are plain data, so that Ray can restart the actor from them.

    Attributes:
        accountant: of the ledger, on which a protocol may depend.
        coordinators: the Ray names of the coordinators that receive every new shard map.
        start_timeout_s: how long a shard may take to start.
        stalled_s: a shard without progress for this long is replaced.
        planned: the protocol for the number of parts for which it is planned already. A plan takes part of a second,
            during which no shard starts.
    """

    namespace: str
    plans: tuple[ShardPlan, ...]
    protocol_settings: Settings
    accountant: Accountant | None
    coordinators: tuple[str, ...]
    start_timeout_s: float = START_TIMEOUT_S
    stalled_s: float = 60.0
    planned: Protocol | None = None

    def protocol(self, parts: int) -> Protocol:
        """Returns the protocol for this number of parts.

        Raises:
            ValueError: the settings cannot be met with it.
        """
        if self.planned is not None and self.planned.parts == parts:
            return self.planned
        return self.protocol_settings.plan(parts, self.accountant)


@dataclass(frozen=True, slots=True)
class ShardHealth:
    """Reports the health of one shard.

    Attributes:
        answers: whether the shard answers within a few seconds and its engine makes progress.
        trouble: why the shard is unhealthy; None if it is healthy.
    """

    name: str
    parts: tuple[int, ...]
    answers: bool
    resident_bytes: int | None
    trouble: str | None = None


class Fleet:
    """Serves the first part groups of the plan. Keeps only its size; after a restart, recovers it from living actors.

    Shards are detached: they and the coordinators continue while this actor is away. When the whole cluster is lost,
    the next deployment starts with the size that `scale` stored.
    """

    def __init__(self, settings: FleetSettings, size: Size, stored: StoredSize | None = None) -> None:
        self._settings = settings
        self._stored = stored
        self._changing = asyncio.Lock()
        self._begun = asyncio.Event()
        self._restarted: bool = ray.get_runtime_context().was_current_actor_reconstructed
        if self._restarted:
            size = _size_of(self._living())
            self._begun.set()
        self._shard_map = self._shard_map_of(size)
        self._published = not self._restarted  # a scaling that nobody repeats may have started or ended shards
        self._nodes: dict[str, str] = {}
        healthy = "1 where a shard answers, else 0."
        self._healthy = EnsembleMetrics(settings.namespace).gauge("privmix_shard_healthy", healthy, "shard")
        # After a restart, shards that hung before it are replaced too, but shards that are still starting are not.
        started = filter(self._has_started, self._shard_map.shards) if self._restarted else ()
        self._answered: dict[str, float] = dict.fromkeys(started, time.monotonic())
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def start(self) -> ShardMap:
        """Starts the missing shards of the shard map and returns when all shards answer.

        Raises:
            FleetError: a shard could not be started.
        """
        async with self._changing:
            await self._start(self._shard_map.shards)
            self._begun.set()
            return self._shard_map

    async def begun(self) -> None:
        """Returns once `start` has returned for the first time."""
        await self._begun.wait()

    async def shard_map(self) -> ShardMap:
        return self._shard_map

    async def settings(self) -> FleetSettings:
        """Returns the settings with which this fleet was created."""
        return self._settings

    async def nodes(self) -> int:
        """Returns on how many nodes the shards of the shard map are, as far as they have answered."""
        return len({self._nodes[name] for name in self._shard_map.shards if name in self._nodes})

    async def scale(self, shards: int | None = None, copies: int | None = None) -> ShardMap:
        """Serves the first `shards` part groups with `copies` each, also after the loss of the cluster. None: as now.

        New shards join once they answer; old shards finish their requests.

        Raises:
            FleetError: there are fewer groups, a shard could not be started, or the size could not be stored. The
                fleet has not changed.
        """
        async with self._changing:
            before = self._shard_map
            size = Size(
                before.size.shards if shards is None else shards, before.size.copies if copies is None else copies
            )
            if not 1 <= size.shards <= len(self._settings.plans):
                raise FleetError(f"shards: give 1 to {len(self._settings.plans)} for this ensemble, not {size.shards}")
            try:
                shard_map = self._shard_map_of(size)
            except ValueError as error:
                raise FleetError(f"shards: {error}") from error
            added = [name for name in shard_map.shards if name not in before.shards]
            await self._start(added)
            try:
                if self._stored:
                    await asyncio.to_thread(self._stored.write, size)
            except KeysUnavailable as error:
                self._stop(added)
                raise FleetError(f"shards: {error}") from error
            self._shard_map = shard_map
            await self._publish()
            self._stop(name for name in before.shards if name not in shard_map.shards)
            logger.info("%d x %d shards serve %d parts", size.shards, size.copies, shard_map.protocol.parts)
            return self._shard_map

    async def health(self) -> list[ShardHealth]:
        """Returns the state of every shard in the shard map, probed now."""
        return await asyncio.gather(*map(self._probe, self._shard_map.shards))

    async def status(self) -> dict[str, Any]:
        """Returns the status that `privmix status` prints. It does not depend on private text."""
        return {
            "version": self._shard_map.version,
            "parts": self._shard_map.protocol.parts,
            "coordinators": list(self._settings.coordinators),
            "shards": [asdict(shard) for shard in await self.health()],
        }

    async def close(self) -> None:
        """Ends every shard permanently."""
        self._watching.cancel()
        self._stop(self._living())

    def _shard_map_of(self, size: Size) -> ShardMap:
        plans = self._settings.plans[: size.shards]
        protocol = self._settings.protocol(sum(plan.parts for plan in plans))
        groups = (PartGroup(plan.index, plan.models, plan.shards(size.copies)) for plan in plans)
        return ShardMap(time.time_ns(), protocol, tuple(groups))

    def _living(self) -> list[str]:
        """Returns the names of all shards whose actors live, or are restarted by Ray."""
        actors = list_named_actors(all_namespaces=True)
        names = [actor["name"] for actor in actors if actor["namespace"] == self._settings.namespace]
        return list(filter(numbers_of, names))

    async def _start(self, names: Sequence[str]) -> None:
        """Starts these shards, those of one GPU one after another, and waits until all answer.

        Raises:
            FleetError: a shard could not be started. None of them runs.
        """
        try:
            started = []
            for name in names:
                started.append(self._actor(name))
                if 0 < self._plan_of(name).num_gpus < 1:
                    # A starting engine measures the memory that is free on its GPU, so no other may fill it then.
                    await self._wait_for(started[-1:])
            statuses = await self._wait_for(started)
            self._nodes |= {name: status.node for name, status in zip(names, statuses, strict=True)}
            self._answered |= dict.fromkeys(names, time.monotonic())
        except (RayError, TimeoutError, ValueError) as error:
            self._stop(names)
            raise FleetError(f"a shard could not be started: {_reason(error)}") from error

    async def _wait_for(self, actors: Sequence[ActorHandle]) -> list[ShardStatus]:
        """Waits until all these shards answer. Raises TimeoutError if they take longer than a start may."""
        async with asyncio.timeout(self._settings.start_timeout_s):
            statuses: list[ShardStatus] = await asyncio.gather(*(actor.status.remote() for actor in actors))
            return statuses

    def _actor(self, name: str) -> ActorHandle:
        """Returns the actor of a shard, and makes it if there is none. Shards are on different nodes if possible."""
        plan = self._plan_of(name)
        return ShardActor.options(
            name=name,
            namespace=self._settings.namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=plan.num_cpus,
            num_gpus=plan.num_gpus,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": dict(plan.environment)},
        ).remote(plan.engine)

    async def _watch(self) -> None:
        """Replaces shards that failed or stalled. Probes all shards in the shard map periodically."""
        await asyncio.sleep(WATCH_S)
        await periodically(self._tend, WATCH_S, "the shards could not be checked")

    async def _tend(self) -> None:
        if not self._changing.locked():
            shards = await self.health()
            for shard in shards:
                self._healthy.set(float(shard.answers), {"shard": shard.name})
                if self._must_be_replaced(shard):
                    self._replace(shard)
            if not self._published and all(shard.answers for shard in shards):
                async with self._changing:
                    await self._publish()

    async def _publish(self) -> None:
        """Gives every living coordinator the shard map. A coordinator that starts later asks for it.

        A version is a time, so after a clock was put back coordinators take a new map for an old one: then it gets a
        version above theirs.
        """
        while later := [version for version in await self._send_shard_map() if version > self._shard_map.version]:
            self._shard_map = replace(self._shard_map, version=max(later) + 1)
        self._published = True

    async def _send_shard_map(self) -> list[int]:
        """Sends the shard map to every living coordinator, and returns the versions that they use now."""
        living = [actor for name in self._settings.coordinators if (actor := self._find(name))]
        results = await asyncio.gather(
            *(actor.update_shards.remote(self._shard_map) for actor in living), return_exceptions=True
        )
        for error in results:
            if isinstance(error, BaseException):
                logger.warning("a coordinator did not receive the shard map: %s", type(error).__name__)
        return [result for result in results if not isinstance(result, BaseException)]

    def _stop(self, names: Iterable[str]) -> None:
        for actor in filter(None, map(self._find, names)):
            ray.kill(actor)

    async def _probe(self, name: str) -> ShardHealth:
        parts = tuple(self._plan_of(name).part_numbers)
        actor = self._find(name)
        if actor is None:
            return ShardHealth(name, parts, False, None, await self._why_absent(name, "its actor does not exist"))
        try:
            async with asyncio.timeout(PROBE_S):
                status: ShardStatus = await actor.status.remote()
        except TimeoutError:
            return ShardHealth(name, parts, False, None, f"it does not answer within {PROBE_S:g} s")
        except RayError as error:
            self._answered.pop(name, None)
            seen = f"its process is gone ({type(error).__name__})"
            return ShardHealth(name, parts, False, None, await self._why_absent(name, seen))
        self._answered[name], self._nodes[name] = time.monotonic(), status.node
        trouble = status.trouble(self._settings.stalled_s)
        return ShardHealth(name, parts, trouble is None, status.resident_bytes, trouble)

    async def _why_absent(self, name: str, seen: str) -> str:
        """Returns what was seen of a shard, or why it cannot start: a training removes adapters that it replaces."""
        gone = await asyncio.to_thread(self._plan_of(name).engine.missing_adapter)
        if gone is None:
            return seen
        return (
            f"its adapter {gone} is gone: the ensemble was trained again, or moved, since this service started; start "
            "the service again"
        )

    def _must_be_replaced(self, shard: ShardHealth) -> bool:
        """Returns whether the shard does not recover by itself. A shard that has never answered is still starting."""
        if shard.answers:
            return False
        if shard.resident_bytes is not None or self._find(shard.name) is None:
            return True
        silent_s = time.monotonic() - self._answered.get(shard.name, math.inf)
        return silent_s > self._settings.stalled_s

    def _has_started(self, name: str) -> bool:
        """Returns whether Ray has constructed the actor."""
        actor = self._find(name)
        return actor is not None and actors(actor._actor_id.hex())["State"] == "ALIVE"

    def _replace(self, shard: ShardHealth) -> None:
        logger.error("%s is started again: %s", shard.name, shard.trouble)
        self._answered.pop(shard.name, None)
        actor = self._find(shard.name)
        if actor is not None:
            ray.kill(actor, no_restart=False)
        else:
            self._actor(shard.name)

    def _plan_of(self, name: str) -> ShardPlan:
        numbers = numbers_of(name)
        return next(plan for plan in self._settings.plans if numbers and plan.index == numbers[0])

    def _find(self, name: str) -> ActorHandle | None:
        try:
            return ray.get_actor(name, self._settings.namespace)
        except ValueError:
            return None


def _reason(error: Exception) -> str:
    """Returns why a shard did not start. What an engine refuses is at the end of Ray's traceback, in one line."""
    reason = str(error) or "it did not answer in time"
    return reason.splitlines()[-1].partition("ValueError: ")[2] or reason


def _size_of(names: Sequence[str]) -> Size:
    """Returns the size of a fleet that has these shards. Its groups count up to the first without a shard."""
    numbers = [found for name in names if (found := numbers_of(name))] or [(0, 0)]
    groups, copies = zip(*numbers, strict=True)
    return Size(max(1, next(number for number in count() if number not in groups)), 1 + max(copies))


FleetActor = ray.remote(num_cpus=0, resources=HEAD, max_restarts=-1, max_task_retries=-1)(Fleet)
