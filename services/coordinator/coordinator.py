"""The Ray actor that turns an ensemble into private tokens: draw, ask, mix, sample, and pay before anything leaves."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import psutil
import ray
from ray.actor import ActorHandle

from services import tracing
from services.budget.purse import Purse
from services.budget.till import Till
from services.coordinator.delta_queue import DeltaQueue
from services.coordinator.ensemble import Ensemble, Query, Rows
from services.coordinator.messages import Delta, FinishReason, Generation, Overloaded, Unavailable
from services.coordinator.metrics import CoordinatorMetrics
from services.coordinator.pending_release import PendingRelease
from services.coordinator.sequence import Sequence as Live
from services.coordinator.text import Detokenizer
from services.fleet.shard_map import ShardMap
from services.privacy.shaping import shape

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Plain data, from which Ray can make the actor again at any time: other actors go by their names.

    `model` is read for its tokenizer. `fleet` says who serves. `pace_s` hides how many parts a step asked: no step is
    released earlier. `patience_s` is how long one of several copies of a shard is waited for alone. `device` is
    PyTorch's, for the mathematics of a step.
    """

    model: Path
    namespace: str
    budget: str
    fleet: str = "fleet"
    when_exhausted: Literal["refuse", "public"] = "refuse"
    lease_tokens: int = 32
    max_live: int = 64
    max_waiting: int = 256
    step_timeout_s: float = 60.0
    patience_s: float = 5.0
    device: str = "cpu"
    pace_s: float = 0.0


class Coordinator:
    """Owns the live sequences, and nothing that must survive it. When it dies they fail, and its lease stays charged.

    Sends requests to the shards in the current shard map: `shard_map`, by default the fleet's. `update_shards`
    replaces it.
    """

    def __init__(self, settings: CoordinatorSettings, shard_map: ShardMap | None = None) -> None:
        self._settings = settings
        self._between_steps = asyncio.Lock()
        self._take(shard_map or ray.get(self._actor(settings.fleet).shard_map.remote()))
        self._purse = Purse(self._actor(settings.budget), settings.lease_tokens)
        self._till = Till(self._actor(settings.budget))
        self._detokenizer = Detokenizer.load(settings.model)
        self._live: dict[str, Live] = {}
        self._queues: dict[str, DeltaQueue] = {}
        self._stepping: asyncio.Task[None] | None = None
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
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._run())

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
        """Returns when every shard has answered."""
        await self._ensemble.resident_bytes()

    async def measures(self) -> dict[str, Any]:
        """For benchmarks: seconds by stage of a step since the last call, and resident bytes. Nothing private."""
        return {
            **self._steps.take(),
            "coordinator_bytes": psutil.Process().memory_info().rss,
            "shard_bytes": await self._ensemble.resident_bytes(),
        }

    async def close(self) -> None:
        """Cancel what is live and give back what the lease has left."""
        self._end(list(self._live.values()), "cancelled")
        await self._purse.settle()

    async def _run(self) -> None:
        while self._live:
            try:
                async with self._between_steps:
                    await self._step(list(islice(self._live.values(), self._settings.max_live)))
            except Unavailable as error:
                logger.error("step failed: %s", error)
                self._end(list(self._live.values()), "error")
            except Exception as error:
                # The message may hold values of a distribution; the type does not.
                logger.error("step failed: %s", type(error).__name__)
                self._end(list(self._live.values()), "error")
            if not self._live:
                await self._purse.settle()  # who submits meanwhile is found by the loop

    async def _step(self, batch: list[Live]) -> None:
        """One token for each of these, if there is budget. A part of the first trace among them, linked to the rest."""
        traces = list(dict.fromkeys(live.generation.trace for live in batch if live.generation.trace))
        with tracing.span("step", next(iter(traces), None), traces[1:]) as span:
            tracing.say(span, {"privmix.sequences": len(batch)})
            await self._advance(batch)

    async def _advance(self, batch: list[Live]) -> None:
        started = time.perf_counter()
        batch = await self._admit(batch)
        if not batch:
            return
        queries = [Query(live.id, live.tokens, () if live.public else self._protocol.draw()) for live in batch]
        admitted = time.perf_counter()
        rows = await self._ensemble.ask(queries)
        asked = time.perf_counter()
        pending = await asyncio.to_thread(self._pending_release, batch, queries, rows)
        granted = await self._charge(batch, pending)
        tokens = await asyncio.to_thread(pending.sample, granted)
        sampled = time.perf_counter()
        await asyncio.sleep(max(0.0, started + self._settings.pace_s - sampled))
        self._metrics.step(len(queries), len(queries) + len(rows.drawn))
        released = zip(batch, tokens, strict=True)
        self._deliver(self._accept(live, token) for live, token in released if live.id in self._live)
        self._steps.add(len(queries) + len(rows.drawn), admitted - started, asked - admitted, sampled - asked)

    def _accept(self, live: Live, token: int) -> Delta:
        self._metrics.token(live.waited(), first=not live.started, public=live.public)
        return live.accept(token)

    async def _admit(self, batch: list[Live]) -> list[Live]:
        """Those that may have a token: paid for, to be paid for by its measured loss, or by the public model alone."""
        private = [live for live in batch if not live.public]
        if private:
            self._exhaust(private[await self._prepay(len(private)) :])
        return [live for live in batch if live.id in self._live]

    async def _prepay(self, tokens: int) -> int:
        """How many of so many tokens may be asked for."""
        if self._protocol.event.measured:
            return tokens if await self._till.is_open() else 0
        return await self._purse.take(self._protocol.event, tokens)

    async def _charge(self, batch: Sequence[Live], pending: PendingRelease) -> int:
        """How many of the private tokens are paid for; the losses of these are on disk when this returns."""
        if pending.losses is None:
            return len(pending.private)
        granted = await self._till.charge(self._protocol.event, pending.losses)
        self._exhaust([batch[index] for index in pending.private[granted:]])
        return granted

    def _exhaust(self, unpaid: Sequence[Live]) -> None:
        """The budget has nothing for these."""
        left = [live for live in unpaid if live.id in self._live]
        if self._settings.when_exhausted == "public":
            for live in left:
                live.public = True
        else:
            self._end(left, "privacy_budget")

    def _pending_release(self, batch: Sequence[Live], queries: Sequence[Query], rows: Rows) -> PendingRelease:
        answers = shape(
            rows.public.to(self._settings.device),
            rows.drawn.to(self._settings.device),
            tuple(query.models for query in queries),
            tuple(live.generation.options for live in batch),
            overwrite_parts=True,
        )
        return PendingRelease.of(
            self._protocol, answers, [index for index, live in enumerate(batch) if not live.public]
        )

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
            self._ensemble.release(ended)

    def _close_channel(self, channel: str) -> None:
        """Nobody reads this channel any more: its generations would only cost budget."""
        self._end([live for live in self._live.values() if live.channel == channel], "cancelled")
        self._queues.pop(channel, None)


# One call of `events` stays open for each gateway, and submissions come beside it.
CoordinatorActor = ray.remote(max_restarts=-1, max_concurrency=1024)(Coordinator)


class StepTimes:
    """Where the time of the steps went, for the benchmarks."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._totals = {"steps": 0, "rows": 0, "budget_s": 0.0, "shards_s": 0.0, "arithmetic_s": 0.0}

    def add(self, rows: int, budget_s: float, shards_s: float, arithmetic_s: float) -> None:
        for name, value in zip(self._totals, (1, rows, budget_s, shards_s, arithmetic_s), strict=True):
            self._totals[name] += value

    def take(self) -> dict[str, float]:
        totals = dict(self._totals)
        self._clear()
        return totals
