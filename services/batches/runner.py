"""Runs the lines of batches: each as an ordinary request of its key, in the background."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from services.batches.lines import Line, model_of, read_lines
from services.batches.records import OPEN, BatchErrors, Ending, LineResponse, LineResult, new_id
from services.batches.settings import BatchSettings
from services.batches.store import BatchStore, Stored
from services.coordinator.messages import Generation
from services.gateway.delivery import whole
from services.gateway.entrance import Entrance
from services.gateway.errors import ApiError, invalid, unexpected
from services.gateway.hub import Mailbox
from services.gateway.keys import KeyService
from services.gateway.preparation import Preparation
from services.gateway.served import Models
from services.gateway.settings import GatewaySettings
from services.keys.records import KeysUnavailable

MOST_ATTEMPTS = 3
"""A line during which this process was lost this often is given up: each attempt may have been charged."""
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
PULSE_S = 1.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass
class Job:
    """An open batch while it runs. `begun` are the workers whose line has begun: they end it before they stop."""

    stored: Stored
    ending: Ending = "completed"
    workers: set[asyncio.Task[None]] = field(default_factory=set)
    begun: set[asyncio.Task[None]] = field(default_factory=set)

    def stop(self, ending: Ending) -> None:
        """Begin no more lines. What was begun may have been charged, so it is answered."""
        if self.ending == "completed":
            self.ending = ending
        for worker in self.workers - self.begun:
            worker.cancel()


class Runner:
    """Runs every open batch; lines of one owner are under way `places` at a time at most.

    An answer is on disk before its line counts as answered, and a line that is answered is never asked again. A line
    that was under way when this process was lost is asked again.
    """

    def __init__(
        self,
        store: BatchStore,
        settings: BatchSettings,
        preparation: Preparation,
        models: Models,
        keys: KeyService,
        places: int,
    ) -> None:
        self._store = store
        self._settings = settings
        self._preparation = preparation
        self._models = models
        self._keys = keys
        self._places = places
        self._of_owner: dict[str, asyncio.Semaphore] = {}
        self._jobs: dict[str, Job] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._serving = asyncio.Event()
        """Until then no model is known."""

    @classmethod
    def load(cls, store: BatchStore, gateway: GatewaySettings, places: int) -> Self:
        """With tokenizers, and channels to the coordinators, of its own. `serve` opens them."""
        keys = KeyService(gateway.api_keys, gateway.namespace, gateway.keys_actor)
        models = Models(gateway)
        return cls(store, gateway.batches, Preparation(gateway, models), models, keys, places)

    async def serve(self) -> None:
        """Keep the channels to the coordinators open, and tell the keys actor that this process lives."""
        async with self._models.running():
            self._serving.set()
            while True:
                await asyncio.sleep(PULSE_S)
                await self._keys.heartbeat(self._models.heartbeat())

    def start(self, stored: Stored) -> None:
        """Run a batch from where it is, if it does not run already."""
        if stored.batch.id in self._jobs:
            return
        job = self._jobs[stored.batch.id] = Job(stored)
        task = asyncio.create_task(self._run(job))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def cancel(self, batch_id: str) -> None:
        """Let a batch end after the lines that have begun."""
        if job := self._jobs.get(batch_id):
            job.stop("cancelled")

    async def _run(self, job: Job) -> None:
        batch_id = job.stored.batch.id
        try:
            await self._run_to_its_end(job)
        except Exception as error:  # it is open still, and runs again when the service is started again
            _log.error("batch %s stopped with %s", batch_id, type(error).__name__)
        finally:
            del self._jobs[batch_id]

    async def _run_to_its_end(self, job: Job) -> None:
        # What it is now, for it may have been cancelled, or have ended, since it was handed in.
        batch = await _durably(lambda: self._store.batch(job.stored.owner, job.stored.batch.id))
        if batch.status not in OPEN:
            return
        if batch.status == "cancelling":
            job.stop("cancelled")
        job.stored = replace(job.stored, batch=batch)
        content = await _durably(lambda: self._store.content(job.stored.owner, batch.input_file_id))
        lines, errors = await asyncio.to_thread(read_lines, content, batch.endpoint, self._settings.max_lines)
        now = int(time.time())
        if errors:
            failure = {"status": "failed", "failed_at": now, "errors": BatchErrors(data=tuple(errors))}
            await _durably(lambda: self._store.change(batch.id, **failure))
            return
        counts = batch.request_counts.model_copy(update={"total": len(lines)})
        if batch.status == "validating":
            begun = {"in_progress_at": now, "request_counts": counts, "model": model_of(lines)}
            if job.ending == "completed":
                begun["status"] = "in_progress"
            batch = await _durably(lambda: self._store.change(batch.id, **begun))
        answered = await _durably(lambda: self._store.answered(batch.id))
        await self._work_off(job, [line for line in lines if line.number not in answered])
        answered = await _durably(lambda: self._store.answered(batch.id))
        missing = {line.number: line.custom_id for line in lines if line.number not in answered}
        ending: Ending = job.ending if missing or job.ending == "cancelled" else "completed"
        if ending == "completed":
            finalizing = {"status": "finalizing", "finalizing_at": int(time.time())}
            await _durably(lambda: self._store.change(batch.id, **finalizing))
        final = Stored(
            job.stored.owner, batch.model_copy(update={"request_counts": counts}), job.stored.output_expires_s
        )
        await _durably(lambda: self._store.finish(final, ending, missing, self._settings.retention_s))

    async def _work_off(self, job: Job, lines: Sequence[Line]) -> None:
        if job.ending != "completed":
            return
        queue = iter(lines)
        job.workers |= {asyncio.create_task(self._work(job, queue)) for _ in range(min(self._places, len(lines)))}
        left_s = max(0.0, job.stored.batch.expires_at - time.time())
        expiry = asyncio.get_running_loop().call_later(left_s, job.stop, "expired")
        try:
            for outcome in await asyncio.gather(*job.workers, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome
        finally:
            expiry.cancel()

    async def _work(self, job: Job, lines: Iterator[Line]) -> None:
        place = self._of_owner.setdefault(job.stored.owner, asyncio.Semaphore(self._places))
        for line in lines:
            async with place:
                if job.ending != "completed":
                    return
                await self._line(job, line)

    async def _line(self, job: Job, line: Line) -> None:
        batch_id, worker = job.stored.batch.id, _worker()
        attempts = await _durably(lambda: self._store.begin_line(batch_id, line.number))
        if attempts > MOST_ATTEMPTS:
            interrupted = f"the service was restarted {MOST_ATTEMPTS} times during this request"
            answer = _answer(line, ApiError(503, interrupted, code="interrupted", kind="server_error"))
        else:
            answer = await self._asked(job, line)
        await _durably(lambda: self._store.answer_line(batch_id, line.number, *answer))
        job.begun.discard(worker)

    async def _asked(self, job: Job, line: Line) -> tuple[LineResult, tuple[int, int]]:
        pause = FIRST_RETRY_S
        while True:
            try:
                return await self._ask(job, line)
            except ApiError as failure:
                delay = _delay_s(failure, pause)
                if delay is None:
                    return _answer(line, failure)
            except Exception as error:  # a message could quote a prompt
                _log.error("a line of batch %s failed with %s", job.stored.batch.id, type(error).__qualname__)
                return _answer(line, unexpected())
            job.begun.discard(_worker())
            if job.ending != "completed":
                raise asyncio.CancelledError
            await asyncio.sleep(delay)
            pause = min(2 * pause, LONGEST_RETRY_S)

    async def _ask(self, job: Job, line: Line) -> tuple[LineResult, tuple[int, int]]:
        """Answer one line.

        Raises:
            ApiError: as the endpoint refuses or fails.
        """
        identity = await self._keys.identity_of(job.stored.owner)
        await self._serving.wait()
        prepared = await self._preparation.prepare(job.stored.batch.endpoint, line.body)
        if prepared.asked.stream:
            raise invalid("stream", "answers of a batch are not streamed; remove it", "unsupported_parameter")
        self._models.seen.request()
        entrance = Entrance(prepared.served, self._keys, identity, background=True)

        @asynccontextmanager
        async def submit(generations: Sequence[Generation]) -> AsyncIterator[Mailbox]:
            async with entrance.submit(generations) as mailbox:
                job.begun.add(_worker())
                yield mailbox

        written = await whole(submit, prepared.generations, prepared.answer)
        response = LineResponse(status_code=200, request_id=new_id("req_"), body=written.model_dump(mode="json"))
        usage = prepared.answer.usage
        result = LineResult(id=new_id("batch_req_"), custom_id=line.custom_id, response=response)
        return result, (usage.prompt_tokens, usage.completion_tokens)


def _worker() -> asyncio.Task[None]:
    worker: asyncio.Task[None] | None = asyncio.current_task()
    assert worker is not None
    return worker


def _answer(line: Line, failure: ApiError) -> tuple[LineResult, tuple[int, int]]:
    response = LineResponse(status_code=failure.status, request_id=new_id("req_"), body=failure.body())
    return LineResult(id=new_id("batch_req_"), custom_id=line.custom_id, response=response), (0, 0)


def _delay_s(failure: ApiError, pause: float) -> float | None:
    """How long to wait before a line is asked again; None where that does not help, or could be charged twice."""
    waits_for_tomorrow = failure.code == "daily_share_exhausted"
    if failure.status not in (429, 503) or (
        failure.headers.get("x-should-retry") == "false" and not waits_for_tomorrow
    ):
        return None
    return max(pause, float(failure.headers.get("retry-after", 0)))


async def _durably(work: Callable[[], T]) -> T:
    """One transaction, tried until the database takes it: what was answered must not be lost."""
    pause = FIRST_RETRY_S
    while True:
        try:
            return await asyncio.to_thread(work)
        except KeysUnavailable as error:
            _log.warning("%s", error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_RETRY_S)
