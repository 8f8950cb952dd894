"""The Ray actor that owns the shards: it starts and ends them, and tells the coordinators who serves."""

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray._private.state import actors
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from services.fleet.metrics import FleetMetrics
from services.fleet.plan import ShardPlan
from services.fleet.shard_map import PartGroup, ShardMap
from services.privacy.settings import Settings
from services.shard import ShardActor, ShardStatus

NAME = "fleet"
PROBE_S = 5.0
WATCH_S = 5.0

_log = logging.getLogger(__name__)


class FleetError(Exception):
    """The fleet cannot be what was asked; the message says why, and it is what it was."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Plain data, from which Ray can make the actor again.

    `order` is that of the ledger's filter, on which a protocol may depend. `coordinators` are told of every change.
    `grow` lets the next part group join whenever the cluster has room for it. A shard that makes no progress for
    `stalled_s` is replaced.
    """

    namespace: str
    plans: tuple[ShardPlan, ...]
    settings: Settings
    order: float | None
    coordinators: tuple[str, ...]
    grow: bool = False
    start_timeout_s: float = 900.0
    stalled_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ShardHealth:
    """One actor of the fleet.

    Attributes:
        answers: whether it works: it answers within a few seconds, and its engine makes progress.
        trouble: what is wrong with it, in words.
    """

    name: str
    parts: tuple[int, ...]
    answers: bool
    resident_bytes: int | None
    trouble: str | None = None


class Fleet:
    """Serves the first `n` part groups of the plan. Stores only `n`; after a restart, recovers it from living actors.

    Shards are detached: they and the coordinators continue while this actor is away.
    """

    def __init__(self, settings: FleetSettings, shards: int) -> None:
        self._settings = settings
        self._changing = asyncio.Lock()
        self._made_again: bool = ray.get_runtime_context().was_current_actor_reconstructed
        if self._made_again:
            shards = self._living()
        self._shard_map = self._shard_map_of(shards)
        self._replicas: int | None = None
        self._metrics = FleetMetrics()
        # A shard that has hung since before a restart of this actor is replaced too; one that still starts is not.
        started = filter(self._has_started, self._shard_map.shards) if self._made_again else ()
        self._answered: dict[str, float] = dict.fromkeys(started, time.monotonic())
        self._checking = asyncio.Lock()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def start(self) -> ShardMap:
        """Start the shards of the shard map that do not live; returns when all of them answer.

        Raises:
            FleetError: one could not be started.
        """
        async with self._changing:
            await self._raise(range(len(self._shard_map.groups)))
            return self._shard_map

    async def shard_map(self) -> ShardMap:
        return self._shard_map

    async def settings(self) -> FleetSettings:
        """What this fleet was made from."""
        return self._settings

    async def scale(self, shards: int) -> ShardMap:
        """Serve the first `shards` part groups. New ones join once they answer, old ones end once they get no requests.

        Raises:
            FleetError: there are fewer groups, or a shard could not be started; then nothing has changed.
        """
        if not 1 <= shards <= len(self._settings.plans):
            raise FleetError(
                f"shards: this ensemble has part groups for 1 to {len(self._settings.plans)}, not {shards}"
            )
        async with self._changing:
            before = self._shard_map
            await self._raise(range(len(before.groups), shards))
            try:
                self._shard_map = self._shard_map_of(shards)
            except ValueError as error:
                self._lower(range(len(before.groups), shards))
                raise FleetError(f"shards: {error}") from error
            await self._tell()
            self._lower(range(shards, len(before.groups)))
            _log.info("%d shards serve %d parts", shards, self._shard_map.protocol.parts)
            return self._shard_map

    async def replicas(self, count: int) -> None:
        """Follow the replica count of Ray Serve when it changes; until then a later `scale` stays in force.

        After a restart, ignores the first replica count, because it repeats an old one.
        """
        before, self._replicas = self._replicas, count
        if count == before or (before is None and self._made_again):
            return
        if count != len(self._shard_map.groups):
            await self._try_to_scale(count)

    async def health(self) -> list[ShardHealth]:
        """Returns the state of every shard in the shard map, probed now."""
        return await asyncio.gather(*map(self._probe, self._shard_map.shards))

    async def check(self) -> list[ShardHealth]:
        """Probe every shard in the shard map, and replace those that failed or make no progress."""
        async with self._checking:
            found = await self.health()
            for shard in found:
                self._metrics.probed(shard.name, shard.answers)
                if self._is_lost(shard):
                    self._replace(shard)
            return found

    async def status(self) -> dict[str, Any]:
        """For `privmix status`: nothing here depends on the private text."""
        return {
            "version": self._shard_map.version,
            "parts": self._shard_map.protocol.parts,
            "coordinators": list(self._settings.coordinators),
            "shards": [asdict(shard) for shard in await self.health()],
        }

    async def close(self) -> None:
        """End every shard, for good."""
        self._watching.cancel()
        self._lower(range(len(self._settings.plans)))

    def _shard_map_of(self, shards: int) -> ShardMap:
        plans = self._settings.plans[:shards]
        protocol = self._settings.settings.plan(sum(plan.parts for plan in plans), self._settings.order)
        return ShardMap(
            time.time_ns(), protocol, tuple(PartGroup(plan.index, plan.models, plan.shards) for plan in plans)
        )

    def _living(self) -> int:
        """How many of the first groups have an actor."""
        for count, plan in enumerate(self._settings.plans):
            if not any(self._find(name) for name in plan.shards):
                return max(1, count)
        return len(self._settings.plans)

    async def _raise(self, groups: Sequence[int]) -> None:
        try:
            starting = [actor for index in groups for actor in self._actors(self._settings.plans[index])]
            async with asyncio.timeout(self._settings.start_timeout_s):
                await asyncio.gather(*(actor.status.remote() for actor in starting))
            names = [name for index in groups for name in self._settings.plans[index].shards]
            self._answered |= dict.fromkeys(names, time.monotonic())
        except (RayError, TimeoutError, ValueError) as error:
            self._lower(groups)
            raise FleetError(f"a shard could not be started: {error or 'it did not answer in time'}") from error

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
        """Copies keep apart where there are machines enough; a pending group is what Ray's autoscaler acts on."""
        name = self._group_name(plan)
        with suppress(ValueError):
            return ray.util.get_placement_group(name)
        bundle = {"CPU": plan.num_cpus, "GPU": plan.num_gpus}
        needs = {resource: amount for resource, amount in bundle.items() if amount}
        return placement_group([needs] * plan.copies, strategy="SPREAD", name=name, lifetime="detached")

    def _group_name(self, plan: ShardPlan) -> str:
        return f"{self._settings.namespace}-{plan.shards[0]}"

    async def _watch(self) -> None:
        """Check the shards for ever, and start the next part group where there is room."""
        while True:
            await asyncio.sleep(WATCH_S)
            if not self._changing.locked():
                await self.check()
            if self._settings.grow and not self._changing.locked() and self._has_room():
                await self._try_to_scale(len(self._shard_map.groups) + 1)

    def _has_room(self) -> bool:
        """Whether the cluster has the free resources that the next part group reserves."""
        following = self._settings.plans[len(self._shard_map.groups) : len(self._shard_map.groups) + 1]
        idle = ray.available_resources()
        return any(
            idle.get("CPU", 0) >= plan.copies * plan.num_cpus and idle.get("GPU", 0) >= plan.copies * plan.num_gpus
            for plan in following
        )

    async def _try_to_scale(self, shards: int) -> None:
        try:
            await self.scale(shards)
        except FleetError as error:
            _log.warning("%s", error)

    async def _tell(self) -> None:
        """Hand the shard map to every coordinator that lives; one that starts later asks for it."""
        living = [actor for name in self._settings.coordinators if (actor := self._find(name))]
        told = await asyncio.gather(
            *(actor.update_shards.remote(self._shard_map) for actor in living), return_exceptions=True
        )
        for error in told:
            if isinstance(error, BaseException):
                _log.warning("a coordinator was not told who serves: %s", type(error).__name__)

    def _lower(self, groups: Sequence[int]) -> None:
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
            return ShardHealth(name, parts, False, None, "there is no such actor")
        try:
            async with asyncio.timeout(PROBE_S):
                status: ShardStatus = await actor.status.remote()
        except TimeoutError:
            return ShardHealth(name, parts, False, None, f"it does not answer within {PROBE_S:g} s")
        except RayError as error:
            self._answered.pop(name, None)
            return ShardHealth(name, parts, False, None, f"its process is gone ({type(error).__name__})")
        self._answered[name] = time.monotonic()
        trouble = status.trouble(self._settings.stalled_s)
        return ShardHealth(name, parts, trouble is None, status.resident_bytes, trouble)

    def _is_lost(self, shard: ShardHealth) -> bool:
        """Whether this shard does not come back by itself. One that has not answered yet still starts."""
        if shard.answers:
            return False
        if shard.resident_bytes is not None or self._find(shard.name) is None:
            return True
        silent_s = time.monotonic() - self._answered.get(shard.name, math.inf)
        return silent_s > self._settings.stalled_s

    def _has_started(self, name: str) -> bool:
        """Return whether Ray has constructed the actor."""
        actor = self._find(name)
        return actor is not None and actors(actor._actor_id.hex())["State"] == "ALIVE"

    def _replace(self, shard: ShardHealth) -> None:
        _log.error("%s is replaced: %s", shard.name, shard.trouble)
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


FleetActor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Fleet)
