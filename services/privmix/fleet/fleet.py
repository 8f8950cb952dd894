"""Implements the Ray actor that owns the shards: it starts and ends them, and sends the coordinators the shard map."""

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
from ray._private.state import actors
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from privmix.fleet.metrics import FleetMetrics
from privmix.fleet.plan import START_TIMEOUT_S, ShardPlan
from privmix.fleet.shard_map import PartGroup, ShardMap
from privmix.fleet.size import FleetSize
from privmix.foundation.actors import HEAD
from privmix.foundation.errors import FleetError, KeysUnavailable
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
        grow: start the next part group whenever the cluster has the resources.
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
    grow: bool = False
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
    """Serves the first `n` part groups of the plan. Keeps only `n`; after a restart, recovers it from living actors.

    Shards are detached: they and the coordinators continue while this actor is away. When the whole cluster is lost,
    the next deployment starts with the number that `scale` stored.
    """

    def __init__(self, settings: FleetSettings, shards: int, size: FleetSize | None = None) -> None:
        self._settings = settings
        self._size = size
        self._changing = asyncio.Lock()
        self._begun = asyncio.Event()
        self._restarted: bool = ray.get_runtime_context().was_current_actor_reconstructed
        if self._restarted:
            shards = self._count_living()
            self._begun.set()
        self._shard_map = self._shard_map_of(shards)
        self._published = not self._restarted  # a scaling that nobody repeats may have started or ended shards
        self._replicas: int | None = None
        self._metrics = FleetMetrics(settings.namespace)
        # After a restart, shards that hung before it are replaced too, but shards that are still starting are not.
        started = filter(self._has_started, self._shard_map.shards) if self._restarted else ()
        self._answered: dict[str, float] = dict.fromkeys(started, time.monotonic())
        self._checking = asyncio.Lock()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def start(self) -> ShardMap:
        """Starts the missing shards of the shard map and returns when all shards answer.

        Raises:
            FleetError: a shard could not be started.
        """
        async with self._changing:
            await self._start_groups(range(len(self._shard_map.groups)))
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

    async def scale(self, shards: int) -> ShardMap:
        """Serves the first `shards` part groups, also after the loss of the cluster.

        New groups join once they answer; old groups finish their requests.

        Raises:
            FleetError: there are fewer groups, a shard could not be started, or the number could not be stored. The
                fleet has not changed.
        """
        return await self._scale(shards, self._size)

    async def replicas(self, count: int) -> None:
        """Scales to Ray Serve's replica count when that count changes. A call of `scale` holds until the next change.

        After a restart, ignores the first replica count, because it repeats an old one.
        """
        before, self._replicas = self._replicas, count
        if count == before or (before is None and self._restarted):
            return
        if count != len(self._shard_map.groups):
            await self._try_to_scale(count)

    async def health(self) -> list[ShardHealth]:
        """Returns the state of every shard in the shard map, probed now."""
        return await asyncio.gather(*map(self._probe, self._shard_map.shards))

    async def check(self) -> list[ShardHealth]:
        """Probes every shard in the shard map and replaces those that failed or stalled."""
        async with self._checking:
            shards = await self.health()
            for shard in shards:
                self._metrics.probed(shard.name, shard.answers)
                if self._must_be_replaced(shard):
                    self._replace(shard)
            return shards

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
        self._stop_groups(range(len(self._settings.plans)))

    def _shard_map_of(self, shards: int) -> ShardMap:
        plans = self._settings.plans[:shards]
        protocol = self._settings.protocol(sum(plan.parts for plan in plans))
        return ShardMap(
            time.time_ns(), protocol, tuple(PartGroup(plan.index, plan.models, plan.shards) for plan in plans)
        )

    def _count_living(self) -> int:
        """Returns how many part groups, counted from the first without a gap, have a living actor."""
        for count, plan in enumerate(self._settings.plans):
            if not any(self._find(name) for name in plan.shards):
                return max(1, count)
        return len(self._settings.plans)

    async def _scale(self, shards: int, size: FleetSize | None = None) -> ShardMap:
        if not 1 <= shards <= len(self._settings.plans):
            raise FleetError(
                f"shards: this ensemble has part groups for 1 to {len(self._settings.plans)}, not {shards}"
            )
        async with self._changing:
            before = self._shard_map
            await self._start_groups(range(len(before.groups), shards))
            try:
                shard_map = self._shard_map_of(shards)
                if size:
                    await asyncio.to_thread(size.write, shards)
            except (ValueError, KeysUnavailable) as error:
                self._stop_groups(range(len(before.groups), shards))
                raise FleetError(f"shards: {error}") from error
            self._shard_map = shard_map
            await self._publish()
            self._stop_groups(range(shards, len(before.groups)))
            logger.info("%d shards serve %d parts", shards, self._shard_map.protocol.parts)
            return self._shard_map

    async def _start_groups(self, groups: Sequence[int]) -> None:
        try:
            actors = []
            for plan in [self._settings.plans[index] for index in groups]:
                for actor in self._actors(plan):
                    actors.append(actor)
                    if 0 < plan.num_gpus < 1:
                        # A starting engine measures the memory that is free on its GPU, so no other may fill it then.
                        await self._wait_for([actor])
            await self._wait_for(actors)
            names = [name for index in groups for name in self._settings.plans[index].shards]
            self._answered |= dict.fromkeys(names, time.monotonic())
        except (RayError, TimeoutError, ValueError) as error:
            self._stop_groups(groups)
            raise FleetError(f"a shard could not be started: {error or 'it did not answer in time'}") from error

    async def _wait_for(self, actors: Sequence[ActorHandle]) -> None:
        """Waits until all these shards answer. Raises TimeoutError if they take longer than a start may."""
        async with asyncio.timeout(self._settings.start_timeout_s):
            await asyncio.gather(*(actor.status.remote() for actor in actors))

    def _actors(self, plan: ShardPlan) -> Iterator[ActorHandle]:
        group = self._group(plan) if plan.copies > 1 else None
        for position, name in enumerate(plan.shards):
            strategy = PlacementGroupSchedulingStrategy(group, position) if group else "DEFAULT"
            yield ShardActor.options(
                name=name,
                namespace=self._settings.namespace,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=plan.num_cpus,
                num_gpus=plan.num_gpus,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": dict(plan.environment)},
            ).remote(plan.engine)

    def _group(self, plan: ShardPlan) -> PlacementGroup:
        """Reserves resources for the copies, on different nodes if possible. Ray's autoscaler sees a pending group."""
        name = self._group_name(plan)
        with suppress(ValueError):
            return ray.util.get_placement_group(name)
        bundle = {"CPU": plan.num_cpus, "GPU": plan.num_gpus}
        required = {resource: amount for resource, amount in bundle.items() if amount}
        return placement_group([required] * plan.copies, strategy="SPREAD", name=name, lifetime="detached")

    def _group_name(self, plan: ShardPlan) -> str:
        return f"{self._settings.namespace}-{plan.shards[0]}"

    async def _watch(self) -> None:
        """Checks the shards periodically and, with `grow`, starts the next part group when the cluster has room."""
        await asyncio.sleep(WATCH_S)
        await periodically(self._tend, WATCH_S, "the shards could not be checked")

    async def _tend(self) -> None:
        if not self._changing.locked():
            shards = await self.check()
            if not self._published and all(shard.answers for shard in shards):
                async with self._changing:
                    await self._publish()
        if self._settings.grow and not self._changing.locked() and self._has_room():
            await self._try_to_scale(len(self._shard_map.groups) + 1)

    def _has_room(self) -> bool:
        """Returns whether the cluster has the free resources that the next part group reserves."""
        next_plan = self._settings.plans[len(self._shard_map.groups) : len(self._shard_map.groups) + 1]
        idle = ray.available_resources()
        return any(
            idle.get("CPU", 0) >= plan.copies * plan.num_cpus and idle.get("GPU", 0) >= plan.copies * plan.num_gpus
            for plan in next_plan
        )

    async def _try_to_scale(self, shards: int) -> None:
        try:
            await self._scale(shards)
        except FleetError as error:
            logger.warning("%s", error)

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

    def _stop_groups(self, groups: Sequence[int]) -> None:
        for plan in (self._settings.plans[index] for index in groups):
            for actor in filter(None, map(self._find, plan.shards)):
                ray.kill(actor)
            if plan.copies > 1:
                with suppress(ValueError):
                    remove_placement_group(ray.util.get_placement_group(self._group_name(plan)))

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
        self._answered[name] = time.monotonic()
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
            for _ in self._actors(self._plan_of(shard.name)):
                pass

    def _plan_of(self, name: str) -> ShardPlan:
        return next(plan for plan in self._settings.plans if name in plan.shards)

    def _find(self, name: str) -> ActorHandle | None:
        try:
            return ray.get_actor(name, self._settings.namespace)
        except ValueError:
            return None


FleetActor = ray.remote(num_cpus=0, resources=HEAD, max_restarts=-1, max_task_retries=-1)(Fleet)
