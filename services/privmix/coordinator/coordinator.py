"""Implements the Ray actor that generates private tokens: it queries the ensemble, mixes, pays and samples."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from privmix.budget.client import BudgetClient, Reservation
from privmix.coordinator.arithmetic import Arithmetic
from privmix.coordinator.delta_queue import DeltaQueue
from privmix.coordinator.draws import Draws
from privmix.coordinator.ensemble import ShardedEnsemble
from privmix.coordinator.messages import Delta, FinishReason, Generation
from privmix.coordinator.metrics import CoordinatorMetrics, Released
from privmix.coordinator.recovery import is_temporary
from privmix.coordinator.sequence import LiveSequence
from privmix.coordinator.settings import LEASE_TOKENS, StepSettings
from privmix.coordinator.step import Costs, PartlySampled, Step, StepResult, Tokens
from privmix.coordinator.text import Detokenizer
from privmix.fleet.fleet import NAME as FLEET
from privmix.fleet.shard_map import ShardMap
from privmix.foundation.actors import find_actor
from privmix.foundation.errors import CoordinatorStopping, CoordinatorUnavailable, Overloaded, loggable
from privmix.privacy.settings import WhenExhausted
from privmix.shards.shard import ShardStatus
from privmix.structure.compiler import Compiler
from privmix.structure.matcher import Matcher, Position

logger = logging.getLogger(__name__)

REPEAT_S = 0.5
"""Delay before a failed step is repeated."""
MAX_ROWS = 2048
"""The maximum number of rows in a step, each float32 [V]: with 50,000 tokens they take 0.4 GB. One sequence may exceed
it."""
PREFILL_TOKENS = 4096
"""The maximum number of prompt tokens that a step ingests, because all live sequences wait for it. One prompt may
exceed it."""
MAX_LOST = 3
"""A sequence fails when more of its tokens than this were paid for and then lost, one after another: a shard that loses
every token would spend the budget."""
MEASURED = ("steps", "rows", "row_bytes", "sampled")
"""What steps add up for benchmarks. Tokens that are sampled are paid for."""
RETRY_AFTER_S = 30.0
"""Delay before a client should repeat a request that failed because a shard or the budget did not answer."""


@dataclass(frozen=True, slots=True)
class CoordinatorSettings(StepSettings):
    """Holds the settings of a coordinator. They are plain data, so that Ray can restart the actor from them.

    Attributes:
        model: the model's directory, for its tokenizer.
        budget: the Ray name of the budget actor.
        fleet: the Ray name of the fleet actor, which publishes the shard map and replaces failed shards.
        peers: the Ray names of the deployment's other coordinators, which spend from the same budget.
        when_exhausted: what happens to a sequence without budget: it ends, or the base model, public or
            private, continues it at no charge.
        lease_tokens: the minimum number of tokens in a lease.
        device: the PyTorch device for the mathematics of a step.
        threads: the number of threads for the same on a CPU.
    """

    model: Path
    namespace: str
    budget: str
    fleet: str = FLEET
    peers: tuple[str, ...] = ()
    when_exhausted: WhenExhausted = "refuse"
    lease_tokens: int = LEASE_TOKENS
    device: str = "cpu"
    threads: int = 1


class Coordinator:
    """Advances the live sequences, one token for each in a step.

    The shards compute a step while the tokens of the step before become text (`_advance`).

    Keeps no state that must survive a crash. When a coordinator dies, its lease stays charged, and the gateways
    resubmit their generations to a living coordinator with the tokens that they received.

    Sends requests to the shards in the current shard map: `shard_map`, by default the fleet's. `update_shards`
    replaces it.
    """

    def __init__(self, settings: CoordinatorSettings, shard_map: ShardMap | None = None) -> None:
        self._settings = settings
        self._between_steps = asyncio.Lock()
        self._updating = asyncio.Lock()  # while it is held, no step begins ahead
        self._paying = asyncio.Lock()  # while it is held, nobody leaves
        self._asked: tuple[str, ...] = ()  # the sequences that shards are asked for now
        self._arithmetic = Arithmetic(settings.threads, settings.device)
        self._use(shard_map or self._current_shard_map())
        self._budget = BudgetClient(self._actor(settings.budget), settings.lease_tokens, self._recall_leases)
        self._detokenizer = Detokenizer.load(settings.model)
        self._compiler = Compiler(self._detokenizer.vocabulary)
        self._live: dict[str, LiveSequence] = {}
        self._queues: dict[str, DeltaQueue] = {}
        self._left: set[str] = set()  # the channels without a reader: Ray may deliver a submission after its end
        self._stepping: asyncio.Task[None] | None = None
        self._closed = False
        self._began: float | None = None
        self._failing_since: float | None = None
        self._ensemble.prepare()
        self._measured = dict.fromkeys(MEASURED, 0)
        self._metrics = CoordinatorMetrics(settings.namespace)

    async def update_shards(self, shard_map: ShardMap) -> int:
        """Uses this shard map from the next token on, unless it has one of a later version.

        After it returns, shards outside the map get no requests.

        Returns:
            The version of the map that it uses.
        """
        async with self._updating, self._between_steps:
            if shard_map.version > self._shard_map.version:
                self._ensemble.close()
                self._use(shard_map)
                self._forget()
                await asyncio.to_thread(self._ensemble.prepare)
            return self._shard_map.version

    async def submit(self, channel: str, generations: Sequence[Generation]) -> None:
        """Starts generations whose deltas go to `channel`.

        Raises:
            Overloaded: the queue is full. No generation has started.
            CoordinatorStopping: `close` was called. No generation has started.
            CoordinatorUnavailable: the reader of the channel is gone. No generation has started.
            StructureError: a grammar is invalid. No generation has started.
        """
        sequences = [
            LiveSequence(channel, generation, self._detokenizer, await self._matcher(generation))
            for generation in generations
        ]
        positions = await self._positions([(live, ()) for live in sequences])
        if self._closed:
            raise CoordinatorStopping
        if channel in self._left:
            raise CoordinatorUnavailable("the channel was closed")
        if len(self._live) + len(generations) > self._settings.max_live + self._settings.max_waiting:
            raise Overloaded
        self._live |= {live.id: live for live in sequences}
        begun = [live.begin(position) for live, position in zip(sequences, positions, strict=True)]
        self._deliver([delta for delta in begun if delta is not None])
        self._metrics.live(len(self._live))
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._run())

    async def load(self) -> int:
        """Returns the number of generations that are live or waiting."""
        return len(self._live)

    async def cancel(self, ids: Iterable[str]) -> None:
        """Ends generations early. Ignores unknown ids: those generations may have ended."""
        async with self._paying:
            self._end([self._live[id_] for id_ in ids if id_ in self._live], "cancelled")

    async def events(self, channel: str) -> AsyncIterator[list[Delta]]:
        """Yields the deltas of `channel`, one batch for each step. Cancels its generations when the reader stops.

        Each call has a channel of its own.
        A reader that sets Ray's backpressure for this generator has its call ended by Ray when it dies.
        """
        queue = self._queues.setdefault(channel, DeltaQueue())
        try:
            async for batch in queue.batches():
                yield batch
        finally:
            await asyncio.shield(self._close_channel(channel))  # Ray may cancel more than once

    async def event(self) -> str:
        """Returns the privacy event of one token under the current shard map (`Event.to_json`)."""
        return self._protocol.event.to_json()

    async def health(self) -> None:
        """Returns when steps succeed and each part group has a shard that works.

        Raises:
            CoordinatorUnavailable: names what does not work.
        """
        if self._live and self._failing_since is not None:
            raise CoordinatorUnavailable(f"steps have failed for {time.monotonic() - self._failing_since:.0f} s")
        if self._began is not None and time.monotonic() - self._began > self._settings.step_timeout_s:
            raise CoordinatorUnavailable(f"a step has taken {time.monotonic() - self._began:.0f} s")
        for copies in await self._ensemble.status():
            problems = [self._problem(status) for status in copies]
            if all(problems):
                raise CoordinatorUnavailable(f"a part group is not served: {problems[0]}")

    async def measures(self) -> dict[str, int]:
        """Returns counts since the last call. They depend on no private data."""
        measured, self._measured = self._measured, dict.fromkeys(MEASURED, 0)
        return measured

    def _measure(self, **values: int) -> None:
        for name, value in values.items():
            self._measured[name] += value

    async def return_leases(self) -> None:
        """Returns to the ledger the leased tokens that the current step does not use."""
        await self._budget.return_unused()

    async def close(self) -> None:
        """Cancels the live generations, refuses others from now on, and returns the rest of the lease."""
        self._closed = True
        async with self._paying:
            self._end(list(self._live.values()), "cancelled")
        await self._budget.settle()
        self._ensemble.close()

    async def _run(self) -> None:
        while self._live:
            await self._try()
            if not self._live:
                self._failing_since = None
                await self._budget.settle()  # a generation submitted during this call keeps the loop running

    async def _try(self, alone: LiveSequence | None = None) -> None:
        """Advances sequences (`_advance`), and waits after a temporary failure.

        After another failure it tries one sequence at a time, and ends only the sequences that fail alone.
        """
        try:
            await self._advance(alone)
        except Exception as error:
            if is_temporary(error):
                await self._wait_for_recovery(error)
            elif alone is not None:
                self._fail([alone], error)
            else:
                for live in self._next_batch():
                    await self._try(live)
        finally:
            self._began = None

    def _next_batch(self) -> list[LiveSequence]:
        """Returns the oldest sequences that fit `max_live`, `MAX_ROWS` and `PREFILL_TOKENS`, and may advance."""
        batch: list[LiveSequence] = []
        ingested = 0
        row_limit = max(1, MAX_ROWS // self._ensemble.rows_of_a_sequence)
        for live in islice(self._live.values(), min(row_limit, self._settings.max_live)):
            if not live.advances:
                continue
            if live.uncached > 1:
                if ingested and ingested + live.uncached > PREFILL_TOKENS:
                    continue
                ingested += live.uncached
            batch.append(live)
        return batch

    async def _wait_for_recovery(self, error: Exception) -> None:
        """Waits before the next attempt.

        Ends the sequences that have waited longer than `recovery_s`, or of which more than `MAX_LOST` tokens were lost.
        """
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            logger.warning("a step failed and is repeated: %s", loggable(error))
        before = time.monotonic() - self._settings.recovery_s
        late = self._failing_since < before
        given_up = [
            live for live in self._live.values() if live.unreported > MAX_LOST or (late and live.waiting_since < before)
        ]
        if given_up:
            self._fail(given_up, error, RETRY_AFTER_S)
        await asyncio.sleep(REPEAT_S)

    def _fail(self, batch: list[LiveSequence], error: Exception, retry_after: float | None = None) -> None:
        logger.error("%d sequences failed: %s", len(batch), loggable(error))
        self._deliver([live.end("error", retry_after) for live in batch if self._is_live(live)])

    async def _advance(self, alone: LiveSequence | None = None) -> None:
        """Advances sequences token by token, until a shard map waits or none may advance.

        A step begins while the tokens of the step before are picked and become text. All of them are known, and those
        that they end have ended, before a token of that step is charged.

        Args:
            alone: advance this one by one token, and no other.
        """
        async with self._between_steps:
            before: asyncio.Task[None] = asyncio.create_task(asyncio.sleep(0))
            batch = [alone] if alone else self._next_batch()
            try:
                while batch:
                    self._began = time.monotonic()
                    before = await self._step(batch, before)
                    if self._settings.pace_s or not self._protocol.additive:
                        await before
                    await asyncio.sleep(0)  # the shards are asked to pick before they are asked to go on
                    batch = [] if alone or self._updating.locked() else self._next_batch()
                await before
            except Exception:
                await asyncio.gather(before, return_exceptions=True)
                self._forget()
                raise

    async def _step(self, batch: Sequence[LiveSequence], before: asyncio.Task[None]) -> asyncio.Task[None]:
        """Computes, charges and samples a token of each sequence. Returns what releases the tokens.

        Args:
            before: releases the tokens of the step before.
        """
        private = [live for live in batch if not live.public]
        upcoming = sum(live.payable for live in self._live.values() if not live.public)
        async with self._budget.reserve(self._protocol.event, len(private), upcoming, self._protocol.parts) as reserved:
            if reserved.count < len(private):
                await before  # nobody ends while a token of his is on its way
                private = [live for live in private if self._is_live(live)]
            self._exhaust(private[reserved.count :])
            batch = sorted(filter(self._is_live, batch), key=lambda live: live.public)
            if not batch:
                return before
            started = time.perf_counter()
            step = self._begin(batch, reserved)
            self._asked = step.sequences
            try:
                result = await self._ensemble.ask(step)
            finally:
                self._asked = ()
                if left := [live.id for live in batch if not self._is_live(live)]:
                    self._ensemble.drop_caches(left)
            await before
            self._draws.drop(step.sequences[: step.private])
            picking = await self._draw(batch, result, reserved)
        self._measure(steps=1, rows=result.computed, row_bytes=result.received)
        self._metrics.step(len(batch), result.computed)
        return asyncio.create_task(self._release(batch, picking, started))

    async def _release(self, batch: Sequence[LiveSequence], picking: Awaitable[Tokens], started: float) -> None:
        """Waits for the tokens of a step, and releases their text and those that grammars force next."""
        lost: PartlySampled | None = None
        try:
            tokens = await picking
        except PartlySampled as error:
            lost, tokens = error, error.tokens
        drawn = [(live, tokens[at]) for at, live in enumerate(batch) if at in tokens]
        positions = await self._positions([(live, (token,)) for live, token in drawn])
        await asyncio.sleep(max(0.0, started + self._settings.pace_s - time.perf_counter()))
        released = [each for each in zip(drawn, positions, strict=True) if self._is_live(each[0][0])]
        described = [Released(live.waited(), not live.started, live.public) for (live, _), _ in released]
        deltas = [self._accept(*next_, position) for next_, position in released]
        self._metrics.released(described, sum(delta.free for delta in deltas))
        self._deliver(deltas)
        if lost is not None:
            raise lost
        self._failing_since = None

    def _begin(self, batch: Sequence[LiveSequence], reserved: Reservation) -> Step:
        """Draws the parts of each private sequence. Those come first in a batch."""
        ids = [live.id for live in batch if not live.public]
        granted = reserved.allowances[: len(ids)] if self._protocol.event.accounts else None
        return Step(
            tuple(live.id for live in batch),
            tuple(live.tokens for live in batch),
            tuple(live.length for live in batch),
            tuple(live.generation.cache_salt for live in batch),
            tuple(live.options for live in batch),
            tuple(map(self._draws.current, ids)),
            None if granted is None else np.array(granted, dtype=np.int64).reshape(len(ids), self._protocol.parts),
        )

    async def _draw(
        self, batch: Sequence[LiveSequence], result: StepResult, reserved: Reservation
    ) -> Awaitable[Tokens]:
        """Mixes the rows, charges the tokens of a step, and then samples them: they come by place in `batch`.

        No other code samples. A sample shows before it is released: in the state of its grammar, in the time until the
        next position, in a step that fails. So a token is paid for before it exists, and nothing comes in between. Who
        pays is settled before the rows are mixed, because some protocols draw noise there: nobody leaves until the
        ledger, the accounts of the parts and the share of the key are charged. They stay charged if sampling fails. A
        sequence that has ended before gets no sample and pays for none.
        """
        async with self._paying:
            paying = [at for at, live in enumerate(batch[: result.step.private]) if self._is_live(live)]
            granted = await self._charge(await result.mix(), paying, reserved)
            for at in paying[:granted]:
                batch[at].charge()
            self._exhaust([batch[at] for at in paying[granted:]])
            self._measure(sampled=granted)
            free = {at for at, live in enumerate(batch) if live.public and self._is_live(live)}
            for at in (*paying[:granted], *free):
                batch[at].expect()
            return result.sample(paying[:granted], free)

    async def _charge(self, costs: Costs, paying: Sequence[int], reserved: Reservation) -> int:
        """Charges the tokens at these places among the private ones. Returns how many of the first are paid for.

        Raises: see `Reservation.charge` and `Reservation.mark_charged`. No token may be sampled.
        """
        losses = [costs.losses[at] for at in paying] if costs.losses else ()
        granted = min(await reserved.charge(losses), len(paying)) if paying else 0
        if self._protocol.event.accounts:
            reserved.mark_charged({at: costs.charges[at] for at in paying[:granted]})
        else:
            reserved.mark_released(granted)
        return granted

    def _accept(self, live: LiveSequence, token: int, position: Position | None) -> Delta:
        return live.accept(token, position)

    async def _matcher(self, generation: Generation) -> Matcher | None:
        if generation.grammar is None:
            return None
        grammar = generation.grammar
        return (await self._compiler.begun(lambda: grammar, generation.cache_salt or "")).matcher

    async def _positions(self, texts: Sequence[tuple[LiveSequence, tuple[int, ...]]]) -> Sequence[Position | None]:
        """Returns what follows each sequence and then some tokens; None for sequences without a grammar."""
        if not any(live.structured for live, _ in texts):
            return [None] * len(texts)
        return await asyncio.to_thread(lambda: [live.position(*tokens) for live, tokens in texts])

    def _exhaust(self, unpaid: Sequence[LiveSequence]) -> None:
        """Ends sequences for which no budget is left, or continues them with the public model."""
        sequences = list(filter(self._is_live, unpaid))
        if self._settings.when_exhausted != "refuse":
            for live in sequences:
                live.public = True
        else:
            self._end(sequences, "privacy_budget")

    async def _recall_leases(self) -> None:
        """Asks the other coordinators to return unused leases. Skips a coordinator that does not answer in time."""

        async def recall(name: str) -> None:
            await (await find_actor(name, self._settings.namespace)).return_leases.remote()

        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.step_timeout_s):
                await asyncio.gather(*map(recall, self._settings.peers), return_exceptions=True)

    def _problem(self, status: ShardStatus | CoordinatorUnavailable) -> str | None:
        return (
            str(status) if isinstance(status, CoordinatorUnavailable) else status.trouble(self._settings.step_timeout_s)
        )

    def _current_shard_map(self) -> ShardMap:
        """Asks the fleet for its shard map until it answers: Ray does not restart an actor whose `__init__` raises."""
        while True:
            try:
                shard_map: ShardMap = ray.get(self._actor(self._settings.fleet).shard_map.remote())
                return shard_map
            except (RayError, ValueError) as error:
                logger.warning("the fleet does not answer: %s", type(error).__name__)
            time.sleep(REPEAT_S)

    def _actor(self, name: str) -> ActorHandle:
        return ray.get_actor(name, self._settings.namespace)

    def _use(self, shard_map: ShardMap) -> None:
        self._shard_map = shard_map
        self._protocol = shard_map.protocol
        self._draws = Draws(shard_map.protocol)
        self._ensemble = ShardedEnsemble(
            shard_map, self._actor, self._arithmetic, self._settings.step_timeout_s, self._settings.patience_s
        )

    def _forget(self) -> None:
        """Assumes that the shards know nothing. No step reads more contexts again than it may at first."""
        self._ensemble.forget()
        for live in self._live.values():
            live.forget_cache()

    def _is_live(self, live: LiveSequence) -> bool:
        return self._live.get(live.id) is live

    def _end(self, sequences: Sequence[LiveSequence], reason: FinishReason) -> None:
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
            self._draws.drop(ended)
            self._ensemble.drop_caches([id_ for id_ in ended if id_ not in self._asked])

    async def _close_channel(self, channel: str) -> None:
        """Cancels the generations of a channel without a reader, because they would only spend budget."""
        async with self._paying:
            self._end([live for live in self._live.values() if live.channel == channel], "cancelled")
            self._queues.pop(channel, None)
            self._left.add(channel)


# Each gateway keeps one call of `events` open; other calls must run beside these.
CoordinatorActor = ray.remote(max_restarts=-1, max_concurrency=1024)(Coordinator)
