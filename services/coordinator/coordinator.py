"""The Ray actor that turns an ensemble into private tokens: draw, ask, mix, sample, and pay before anything leaves."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from services import tracing
from services.budget.client import BudgetClient, Reservation
from services.budget.errors import LedgerError
from services.coordinator.arithmetic import Arithmetic
from services.coordinator.delta_queue import DeltaQueue
from services.coordinator.ensemble import Ensemble, Query
from services.coordinator.messages import Delta, FinishReason, Generation, Overloaded, Unavailable
from services.coordinator.metrics import CoordinatorMetrics
from services.coordinator.recovery import passes
from services.coordinator.sequence import Sequence as Live
from services.coordinator.text import Detokenizer
from services.fleet.shard_map import ShardMap
from services.shard import ShardStatus

logger = logging.getLogger(__name__)

REPEAT_S = 0.5
"""Between a step that failed and its repetition."""
RETRY_AFTER_S = 30.0
"""When a client may repeat a request that failed because a shard, or the budget, did not answer."""


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Plain data, from which Ray can make the actor again at any time: other actors go by their names.

    Attributes:
        model: read for its tokenizer.
        fleet: the actor that names the shards, and replaces those that fail.
        peers: the other coordinators of this deployment, with which this one shares what is left of the budget.
        lease_tokens: how many tokens a lease holds at least.
        max_live: how many sequences a step advances at most.
        max_waiting: how many more can wait for their turn.
        max_rows: how many rows a step holds at most, the first sequence's excepted: each is a float32 a token of the
            vocabulary.
        prefill_tokens: how many tokens of new contexts a step ingests at most, the first new one excepted.
        step_timeout_s: without an answer for this long, a shard counts as stalled.
        recovery_s: for how long sequences wait for a shard, the budget or its database to come back before they fail.
        patience_s: how long one of several copies of a shard may take before another one is called, too.
        device: PyTorch's, for the mathematics of a step.
        threads: for the same, on a CPU.
        pace_s: no step is released earlier.
    """

    model: Path
    namespace: str
    budget: str
    fleet: str = "fleet"
    peers: tuple[str, ...] = ()
    when_exhausted: Literal["refuse", "public"] = "refuse"
    lease_tokens: int = 32
    max_live: int = 64
    max_waiting: int = 256
    max_rows: int = 2048
    prefill_tokens: int = 4096
    step_timeout_s: float = 60.0
    recovery_s: float = 90.0
    patience_s: float = 5.0
    device: str = "cpu"
    threads: int = 1
    pace_s: float = 0.0


class Coordinator:
    """Owns the live sequences, and nothing that must survive it. When it dies its lease stays charged, and the gateways
    submit their generations again, here or to another coordinator, with the tokens that they received.

    Sends requests to the shards in the current shard map: `shard_map`, by default the fleet's. `update_shards`
    replaces it.
    """

    def __init__(self, settings: CoordinatorSettings, shard_map: ShardMap | None = None) -> None:
        self._settings = settings
        self._between_steps = asyncio.Lock()
        self._take(shard_map or self._current_shard_map())
        self._budget = BudgetClient(self._actor(settings.budget), settings.lease_tokens, self._recall_leases)
        self._detokenizer = Detokenizer.load(settings.model)
        self._live: dict[str, Live] = {}
        self._queues: dict[str, DeltaQueue] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._began: float | None = None
        self._failing_since: float | None = None
        self._arithmetic = Arithmetic(settings.threads, settings.device)
        self._steps = StepTimes()
        self._metrics = CoordinatorMetrics()

    async def update_shards(self, shard_map: ShardMap) -> None:
        """Use this shard map from the next token on. On return, shards that it does not name get no more requests."""
        async with self._between_steps:
            if shard_map.version > self._shard_map.version:
                self._take(shard_map)

    async def submit(self, channel: str, generations: Sequence[Generation]) -> None:
        """Begin generations whose deltas go to `channel`.

        Raises:
            Overloaded: too many wait already.
        """
        if len(self._live) + len(generations) > self._settings.max_live + self._settings.max_waiting:
            raise Overloaded
        for generation in generations:
            self._live[generation.id] = Live(channel, generation, self._detokenizer)
        self._metrics.live(len(self._live))
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._run())

    async def load(self) -> int:
        """Return how many generations are live or wait."""
        return len(self._live)

    async def cancel(self, ids: Iterable[str]) -> None:
        """End generations early. Unknown ids are no error: they may have ended meanwhile."""
        self._end([self._live[id_] for id_ in ids if id_ in self._live], "cancelled")

    async def events(self, channel: str) -> AsyncIterator[list[Delta]]:
        """What happens to the generations of `channel`, one batch a step, for as long as the channel is read.

        A reader that limits how much may wait unread (Ray's backpressure) has its call ended by Ray when it dies.
        """
        queue = self._queues.setdefault(channel, DeltaQueue())
        try:
            async for batch in queue.batches():
                yield batch
        finally:
            self._close_channel(channel)

    async def event(self) -> str:
        """What a token costs now (`Event.to_json`)."""
        return self._protocol.event.to_json()

    async def health(self) -> None:
        """Returns when steps succeed and each part group has a shard that works.

        Raises:
            Unavailable: names what does not work.
        """
        if self._live and self._failing_since is not None:
            raise Unavailable(f"steps have failed for {time.monotonic() - self._failing_since:.0f} s")
        if self._began is not None and time.monotonic() - self._began > self._settings.step_timeout_s:
            raise Unavailable(f"a step has taken {time.monotonic() - self._began:.0f} s")
        for copies in await self._ensemble.status():
            troubles = [self._trouble(status) for status in copies]
            if all(troubles):
                raise Unavailable(f"a part group is not served: {troubles[0]}")

    async def measures(self) -> dict[str, Any]:
        """For benchmarks: seconds by stage of a step since the last call, and resident bytes. Nothing private."""
        statuses = [status for copies in await self._ensemble.status() for status in copies]
        return {
            **self._steps.take(),
            "coordinator_bytes": psutil.Process().memory_info().rss,
            "shard_bytes": [status.resident_bytes for status in statuses if isinstance(status, ShardStatus)],
        }

    async def return_leases(self) -> None:
        """Returns when the ledger has what the leases of this coordinator hold and its present step does not use."""
        await self._budget.return_unused()

    async def close(self) -> None:
        """Cancel what is live and give back what the lease has left."""
        self._end(list(self._live.values()), "cancelled")
        await self._budget.settle()

    async def _run(self) -> None:
        while self._live:
            batch = self._next_batch()
            try:
                async with self._between_steps:
                    self._began = time.monotonic()
                    await self._step(batch)
                self._failing_since = None
            except Exception as error:
                if passes(error):
                    await self._wait_for_recovery(error)
                else:
                    await self._isolate(batch, error)
            finally:
                self._began = None
            if not self._live:
                self._failing_since = None
                await self._budget.settle()  # the loop finds what is submitted meanwhile

    def _next_batch(self) -> list[Live]:
        """The oldest sequences whose rows fit, of which new ones only as far as their contexts are ingested quickly."""
        batch: list[Live] = []
        ingested = 0
        fitting = max(1, self._settings.max_rows // self._ensemble.rows_of_a_query)
        for live in islice(self._live.values(), min(fitting, self._settings.max_live)):
            if not live.cached:
                if ingested and ingested + len(live.tokens) > self._settings.prefill_tokens:
                    continue
                ingested += len(live.tokens)
            batch.append(live)
        return batch

    async def _wait_for_recovery(self, error: Exception) -> None:
        """Keep the sequences while what failed is replaced; end those that have waited for it for `recovery_s`."""
        _forget_caches(self._live.values())
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            logger.warning("a step failed and is repeated: %s", _described(error))
            with suppress(ValueError):  # a deployment of one part has no fleet
                self._actor(self._settings.fleet).check.remote()
        before = time.monotonic() - self._settings.recovery_s
        if self._failing_since < before:
            self._fail([live for live in self._live.values() if live.waiting_since < before], error, RETRY_AFTER_S)
        await asyncio.sleep(REPEAT_S)

    async def _isolate(self, batch: list[Live], error: Exception) -> None:
        """Repeat a step that no wait would mend with one sequence at a time, to end those alone that make it fail."""
        if len(batch) == 1:
            self._fail(batch, error)
        for live in batch if len(batch) > 1 else []:
            try:
                async with self._between_steps:
                    await self._step([live])
            except Exception as own:
                if not passes(own):  # otherwise it goes on with the next whole step
                    self._fail([live], own)

    def _fail(self, batch: list[Live], error: Exception, retry_after: float | None = None) -> None:
        logger.error("%d sequences failed: %s", len(batch), _described(error))
        left = [live for live in batch if live.id in self._live]
        self._deliver([live.end("error", retry_after) for live in left])

    async def _step(self, batch: list[Live]) -> None:
        """One token for each of these, if there is budget. A part of the first trace among them, linked to the rest."""
        traces = list(dict.fromkeys(live.generation.trace for live in batch if live.generation.trace))
        with tracing.span("step", next(iter(traces), None), traces[1:]) as span:
            tracing.say(span, {"privmix.sequences": len(batch)})
            private = [live for live in batch if not live.public]
            upcoming = sum(live.remaining for live in self._live.values() if not live.public)
            async with self._budget.reserve(self._protocol.event, len(private), upcoming) as reserved:
                self._exhaust(private[reserved.count :])
                await self._advance([live for live in batch if live.id in self._live], reserved)

    async def _advance(self, batch: list[Live], reserved: Reservation) -> None:
        if not batch:
            return
        started = time.perf_counter()
        rows = await self._ensemble.ask([Query(live.id, live.tokens, not live.public) for live in batch])
        asked = time.perf_counter()
        pending = await self._arithmetic.release(self._protocol, rows, [live.generation.options for live in batch])
        private = [live for live, one in zip(batch, rows.private, strict=True) if one]
        losses = [loss for piece in pending for loss in piece.losses or ()]
        granted = min(len(private), await reserved.charge(losses)) if private else 0
        self._exhaust(private[granted:])
        tokens = await self._arithmetic.sample(pending, granted)
        sampled = time.perf_counter()
        await asyncio.sleep(max(0.0, started + self._settings.pace_s - sampled))
        paid = {live.id for live in private[:granted]}
        released = [(live, token) for live, token in zip(batch, tokens, strict=True) if live.id in self._live]
        reserved.release(sum(live.id in paid for live, _ in released))
        self._metrics.step(len(batch), rows.computed)
        self._deliver([self._accept(live, token) for live, token in released])
        self._steps.add(rows.computed, asked - started, sampled - asked)

    def _accept(self, live: Live, token: int) -> Delta:
        self._metrics.token(live.waited(), first=not live.started, public=live.public)
        live.cached = True
        return live.accept(token)

    def _exhaust(self, unpaid: Sequence[Live]) -> None:
        """The budget has nothing for these."""
        left = [live for live in unpaid if live.id in self._live]
        if self._settings.when_exhausted == "public":
            for live in left:
                live.public = True
        else:
            self._end(left, "privacy_budget")

    async def _recall_leases(self) -> None:
        """Wait until the other coordinators have returned what they do not use; one that does not answer keeps its."""
        calls = []
        for name in self._settings.peers:
            with suppress(ValueError):  # it is not alive
                calls.append(asyncio.ensure_future(self._actor(name).return_leases.remote()))
        if calls:
            await asyncio.wait(calls, timeout=self._settings.step_timeout_s)

    def _trouble(self, status: ShardStatus | Unavailable) -> str | None:
        return str(status) if isinstance(status, Unavailable) else status.trouble(self._settings.step_timeout_s)

    def _current_shard_map(self) -> ShardMap:
        """Wait for the fleet, for ever: Ray does not restart an actor whose constructor raises."""
        while True:
            try:
                shard_map: ShardMap = ray.get(self._actor(self._settings.fleet).shard_map.remote())
                return shard_map
            except (RayError, ValueError) as error:
                logger.warning("the fleet does not answer: %s", type(error).__name__)
                time.sleep(REPEAT_S)

    def _actor(self, name: str) -> ActorHandle:
        return ray.get_actor(name, self._settings.namespace)

    def _take(self, shard_map: ShardMap) -> None:
        self._shard_map = shard_map
        self._protocol = shard_map.protocol
        self._ensemble = Ensemble(shard_map, self._actor, self._settings.step_timeout_s, self._settings.patience_s)

    def _end(self, sequences: Sequence[Live], reason: FinishReason) -> None:
        self._deliver([live.end(reason) for live in sequences])

    def _deliver(self, deltas: Iterable[Delta]) -> None:
        by_channel: dict[str, list[Delta]] = {}
        ended = []
        for delta in deltas:
            by_channel.setdefault(self._live[delta.id].channel, []).append(delta)
            if delta.finish_reason is not None:
                ended.append(delta.id)
        for channel, batch in by_channel.items():
            self._queues.setdefault(channel, DeltaQueue()).put(batch)
        for id_ in ended:
            del self._live[id_]
        if ended:
            self._metrics.live(len(self._live))
            self._ensemble.release(ended)

    def _close_channel(self, channel: str) -> None:
        """Nobody reads this channel any more: its generations would only cost budget."""
        self._end([live for live in self._live.values() if live.channel == channel], "cancelled")
        self._queues.pop(channel, None)


# One call of `events` stays open for each gateway, and submissions come beside it.
CoordinatorActor = ray.remote(max_restarts=-1, max_concurrency=1024)(Coordinator)


def _forget_caches(sequences: Iterable[Live]) -> None:
    for live in sequences:
        live.cached = False


def _described(error: Exception) -> str:
    """The message of an error of ours; of any other its type, because its message may hold values of a distribution."""
    cause = getattr(error, "cause", error)
    return str(cause) if isinstance(cause, Unavailable | LedgerError) else type(cause).__name__


class StepTimes:
    """Where the time of the steps went, for the benchmarks."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._totals = {"steps": 0, "rows": 0, "shards_s": 0.0, "arithmetic_s": 0.0}

    def add(self, rows: int, shards_s: float, arithmetic_s: float) -> None:
        for name, value in zip(self._totals, (1, rows, shards_s, arithmetic_s), strict=True):
            self._totals[name] += value

    def take(self) -> dict[str, float]:
        totals = dict(self._totals)
        self._clear()
        return totals
