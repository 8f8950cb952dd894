"""Runs the lines of batches in the background, each as an ordinary request of its key."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self, TypeVar

from privmix.batches.lines import Line, model_of, read_lines
from privmix.batches.records import OPEN, BatchError, BatchErrors, Ending, LineResponse, LineResult, new_id
from privmix.batches.settings import BatchSettings
from privmix.batches.store import Answered, BatchStore, LeaseLost, OpenBatch
from privmix.coordinator.messages import Generation
from privmix.foundation.errors import KeysUnavailable, NotStored
from privmix.foundation.retrying import pauses, repeated
from privmix.requests.admission import Admission, complete_answer
from privmix.requests.errors import ApiError, body_too_large, invalid, unexpected
from privmix.requests.keys import KeyService
from privmix.requests.models import ServedModel
from privmix.requests.preparation import Preparation
from privmix.requests.response_queue import ResponseQueue
from privmix.requests.settings import ClientSettings, RequestSettings

MAX_ATTEMPTS = 3
"""A line fails after this many attempts in which this process died, because each attempt may have been charged."""
COST_UNKNOWN = ("stalled", "coordinator_lost")
"""The codes of failures after which nobody knows whether tokens were charged. A line fails after `MAX_ATTEMPTS` too."""
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass
class RunningBatch:
    """Holds a running batch.

    Attributes:
        ending: the final status of the batch.
        generating: the workers whose line may already have been charged. They finish their line before they stop.
        abandoned: whether another deployment may run the lines now, so that this one may not.
        answers: the results that are not stored yet. `storing` stores them, all that came meanwhile at a time.
    """

    open_batch: OpenBatch
    ending: Ending = "completed"
    workers: set[asyncio.Task[None]] = field(default_factory=set)
    generating: set[asyncio.Task[None]] = field(default_factory=set)
    abandoned: bool = False
    answers: list[Answered] = field(default_factory=list)
    storing: asyncio.Task[None] | None = None

    def stop(self, ending: Ending) -> None:
        """Starts no more lines. Lines that may have been charged still finish."""
        if self.ending == "completed":
            self.ending = ending
        for worker in self.workers - self.generating:
            worker.cancel()

    def abandon(self) -> None:
        """Cancels all lines, also those that may have been charged."""
        self.abandoned = True
        for worker in self.workers:
            worker.cancel()


class _AnswerLostError(Exception):
    """An answer failed after it had released tokens. Its arguments are the failure and the line's usage."""


class Runner:
    """Runs all open batches while `holder` has the lease. At most `capacity` lines of one owner run at the same time.

    The result of a line is on disk before the line counts as answered, and an answered line never runs again. A line
    that was running when this process died runs again. Whatever fails in a line fails this line alone, and its result
    has the usage of the tokens that were lost: so the usage of a batch is that of its two files together.
    """

    def __init__(
        self,
        store: BatchStore,
        settings: BatchSettings,
        preparation: Preparation,
        served: ServedModel,
        keys: KeyService,
        capacity: int,
        holder: str,
        max_body_bytes: int = ClientSettings().max_body_bytes,
    ) -> None:
        self._store = store
        self._holder = holder
        self._settings = settings
        self._preparation = preparation
        self._served = served
        self._keys = keys
        self._capacity = capacity
        self._max_body_bytes = max_body_bytes
        self._semaphores: dict[str, asyncio.Semaphore] = {}
        self._jobs: dict[str, RunningBatch] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._serving = asyncio.Event()
        """Set once the models are loaded. Before, every model is unknown."""

    @classmethod
    def load(
        cls, store: BatchStore, settings: BatchSettings, requests: RequestSettings, capacity: int, holder: str
    ) -> Self:
        """Creates a runner with its own tokenizers and channels to the coordinators. `serve` opens them."""
        keys = KeyService(requests.api_key_hashes, requests.namespace, requests.keys_actor, requests.cache_secret)
        served = ServedModel.of(requests.ensemble)
        preparation = Preparation(requests, served)
        return cls(store, settings, preparation, served, keys, capacity, holder, requests.max_body_bytes)

    async def serve(self) -> None:
        """Keeps the channels to the coordinators open and sends heartbeats to the keys actor."""
        async with self._served.client.running():
            self._serving.set()
            await self._keys.send_heartbeats(self._served.take_update)

    def start(self, open_batch: OpenBatch) -> None:
        """Starts or continues a batch unless it already runs."""
        if open_batch.batch.id in self._jobs:
            return
        job = self._jobs[open_batch.batch.id] = RunningBatch(open_batch)
        task = asyncio.create_task(self._run(job))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def cancel(self, batch_id: str) -> None:
        """Ends a batch after its running lines."""
        if job := self._jobs.get(batch_id):
            job.stop("cancelled")

    def abandon(self) -> None:
        """Cancels all lines that run. Their batches stay open, for the deployment that has the lease."""
        for job in self._jobs.values():
            job.abandon()

    async def _run(self, job: RunningBatch) -> None:
        batch_id = job.open_batch.batch.id
        try:
            await self._run_to_end(job)
        except LeaseLost:
            logger.warning("batch %s continues in another deployment", batch_id)
        except Exception as error:  # The batch stays open and continues when the service restarts.
            logger.error("batch %s stopped with %s", batch_id, type(error).__name__)
        finally:
            del self._jobs[batch_id]

    async def _run_to_end(self, job: RunningBatch) -> None:
        # Reads the batch again, because it may have been cancelled or have ended meanwhile.
        batch = await _durably(lambda: self._store.batch(job.open_batch.owner, job.open_batch.batch.id))
        if batch.status not in OPEN:
            return
        if batch.status == "cancelling":
            job.stop("cancelled")
        job.open_batch = replace(job.open_batch, batch=batch)
        now = int(time.time())
        try:
            content = await _durably(lambda: self._store.content(job.open_batch.owner, batch.input_file_id))
        except NotStored as lost:
            await self._end_without_input(job.open_batch, lost)
            return
        lines, errors, model = await asyncio.to_thread(_read, content, batch.endpoint, self._settings.max_lines)
        if errors:
            failure = {"status": "failed", "failed_at": now, "errors": BatchErrors(data=tuple(errors))}
            await _durably(lambda: self._store.change(batch.id, **failure))
            return
        counts = batch.request_counts.model_copy(update={"total": len(lines)})
        if batch.status == "validating":
            changes = {"in_progress_at": now, "request_counts": counts, "model": model}
            if job.ending == "completed":
                changes["status"] = "in_progress"
            batch = await _durably(lambda: self._store.change(batch.id, **changes))
        answered = await _durably(lambda: self._store.answered(batch.id))
        await self._run_lines(job, [line for line in lines if line.number not in answered])
        answered = await _durably(lambda: self._store.answered(batch.id))
        custom_ids = {line.number: line.custom_id for line in lines}
        ending: Ending = job.ending if custom_ids.keys() - answered or job.ending == "cancelled" else "completed"
        if ending == "completed":
            finalizing = {"status": "finalizing", "finalizing_at": int(time.time())}
            await _durably(lambda: self._store.change(batch.id, **finalizing))
        final = OpenBatch(
            job.open_batch.owner, batch.model_copy(update={"request_counts": counts}), job.open_batch.output_expires_s
        )
        await _durably(lambda: self._store.finish(final, ending, custom_ids, self._settings.retention_s, self._holder))

    async def _end_without_input(self, open_batch: OpenBatch, lost: NotStored) -> None:
        """Ends a batch whose input file is lost. What was answered is delivered, because its tokens are charged."""
        batch_id, errors = (
            open_batch.batch.id,
            (BatchError(code=lost.code, message=lost.message, param="input_file_id"),),
        )
        changes: dict[str, object] = {"errors": BatchErrors(data=errors)}
        if not await _durably(lambda: self._store.answered(batch_id)):
            changes |= {"status": "failed", "failed_at": int(time.time())}
        batch = await _durably(lambda: self._store.change(batch_id, **changes))
        if batch.status in OPEN:
            retention_s, final = self._settings.retention_s, replace(open_batch, batch=batch)
            await _durably(lambda: self._store.finish(final, "expired", {}, retention_s, self._holder))

    async def _run_lines(self, job: RunningBatch, lines: Sequence[Line]) -> None:
        if job.abandoned:
            raise LeaseLost
        if job.ending != "completed":
            return
        queue = iter(lines)
        job.workers |= {asyncio.create_task(self._work(job, queue)) for _ in range(min(self._capacity, len(lines)))}
        left_s = max(0.0, job.open_batch.batch.expires_at - time.time())
        expiry = asyncio.get_running_loop().call_later(left_s, job.stop, "expired")
        try:
            for result in await asyncio.gather(*job.workers, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result
        finally:
            expiry.cancel()
            if job.storing is not None:  # it is not cancelled with a line: what was answered is charged
                await asyncio.gather(job.storing, return_exceptions=True)  # its lines raise its error
        if job.abandoned:
            raise LeaseLost

    async def _work(self, job: RunningBatch, lines: Iterator[Line]) -> None:
        semaphore = self._semaphores.setdefault(job.open_batch.owner, asyncio.Semaphore(self._capacity))
        for line in lines:
            async with semaphore:
                if job.ending != "completed":
                    return
                await self._run_line(job, line)

    async def _run_line(self, job: RunningBatch, line: Line) -> None:
        batch_id, worker = job.open_batch.batch.id, _worker()
        attempts = await _durably(lambda: self._store.begin_line(batch_id, line.number, self._holder))
        if attempts > MAX_ATTEMPTS:
            interrupted = f"the service was restarted {MAX_ATTEMPTS} times during this request"
            result = _failed(line, ApiError(503, interrupted, code="interrupted", kind="server_error"))
        elif len(line.body) > self._max_body_bytes:  # its parsing would take the time of other lines
            result = _failed(line, body_too_large(self._max_body_bytes))
        elif await _durably(lambda: self._store.stored(job.open_batch.owner)) >= self._settings.max_stored_bytes:
            full = f"the files of this key have {self._settings.max_stored_bytes} bytes together; delete some files"
            result = _failed(line, ApiError(400, full, code="storage_full"))
        else:
            result = _writable(line, *await self._answer_with_retries(job, line))
        await self._record(job, Answered(line.number, *result))
        job.generating.discard(worker)

    async def _record(self, job: RunningBatch, answer: Answered) -> None:
        """Returns when the result of a line is stored. Results that come while others are stored share a part."""
        job.answers.append(answer)
        if job.storing is None or job.storing.done():
            job.storing = asyncio.create_task(self._store_answers(job))
        await asyncio.shield(job.storing)

    async def _store_answers(self, job: RunningBatch) -> None:
        owner, batch_id = job.open_batch.owner, job.open_batch.batch.id
        while answers := list(job.answers):
            stored = await _durably(partial(self._store.answer_lines, owner, batch_id, answers))
            del job.answers[:stored]

    async def _answer_with_retries(self, job: RunningBatch, line: Line) -> tuple[LineResult, tuple[int, int]]:
        waits, unknown = pauses(FIRST_RETRY_S, LONGEST_RETRY_S), 0
        while True:
            try:
                return await self._answer(job, line)
            except ApiError as failure:
                delay = _delay_s(failure, next(waits))
                unknown += failure.code in COST_UNKNOWN
                if delay is None or unknown == MAX_ATTEMPTS:
                    return _failed(line, failure)
            except _AnswerLostError as lost:  # another attempt would charge for the tokens again
                return _failed(line, *lost.args)
            except Exception as error:
                _log_failure(job, error)
                return _failed(line, unexpected())
            job.generating.discard(_worker())
            if job.ending != "completed":
                raise asyncio.CancelledError
            await asyncio.sleep(delay)

    async def _answer(self, job: RunningBatch, line: Line) -> tuple[LineResult, tuple[int, int]]:
        """Generates the result of one line.

        Raises:
            ApiError: the refusal or failure that the endpoint would return.
            _AnswerLostError: the same, after some tokens.
        """
        identity = await self._keys.identity_of(job.open_batch.owner)
        await self._serving.wait()
        salt = self._keys.cache_salt(identity)
        prepared = await self._preparation.prepare(job.open_batch.batch.endpoint, line.body, salt)
        if prepared.body.stream:
            raise invalid("stream", "a batch cannot stream its answers; remove it", "unsupported_parameter")
        self._served.client.counters.request()
        admission = Admission(prepared.served, self._keys, identity, background=True)

        @asynccontextmanager
        async def submit(generations: Sequence[Generation]) -> AsyncIterator[ResponseQueue]:
            async with admission.submit(generations) as queue:
                job.generating.add(_worker())
                yield queue

        try:
            answer = await complete_answer(submit, prepared.generations, prepared.answer)
            body = answer.model_dump(mode="json")
        except Exception as error:
            lost = prepared.answer.usage
            if not lost.completion_tokens:
                raise
            if not isinstance(error, ApiError):
                _log_failure(job, error)
            failure = error if isinstance(error, ApiError) else unexpected()
            raise _AnswerLostError(failure, (lost.prompt_tokens, lost.completion_tokens)) from None
        usage = prepared.answer.usage
        response = LineResponse(status_code=200, request_id=new_id("req_"), body=body)
        result = LineResult(id=new_id("batch_req_"), custom_id=line.custom_id, response=response)
        return result, (usage.prompt_tokens, usage.completion_tokens)


def _read(content: bytes, endpoint: str, most_lines: int) -> tuple[list[Line], list[BatchError], str | None]:
    """Returns the lines of a file, its errors and its model, all of which takes as long as the file is large."""
    lines, errors = read_lines(content, endpoint, most_lines)
    return lines, errors, model_of(lines)


def _worker() -> asyncio.Task[None]:
    worker: asyncio.Task[None] | None = asyncio.current_task()
    assert worker is not None
    return worker


def _failed(line: Line, failure: ApiError, usage: tuple[int, int] = (0, 0)) -> tuple[LineResult, tuple[int, int]]:
    """Returns the result of a line that failed; `usage`: the prompt and completion tokens that were lost with it."""
    prompt, completion = usage
    lost = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    body = failure.body() | ({"usage": lost} if completion else {})
    response = LineResponse(status_code=failure.status, request_id=new_id("req_"), body=body)
    return LineResult(id=new_id("batch_req_"), custom_id=line.custom_id, response=response), usage


def _writable(line: Line, result: LineResult, usage: tuple[int, int]) -> tuple[LineResult, tuple[int, int]]:
    """Returns the result, or that of a failed line if it cannot be written: an error at its writing ends the batch."""
    try:
        result.text()
    except Exception as error:
        logger.error("the result of a line cannot be written: %s", type(error).__qualname__)
        return _failed(line, unexpected(), usage)
    return result, usage


def _log_failure(job: RunningBatch, error: Exception) -> None:
    """Logs the kind of an error. Its message could quote a prompt."""
    logger.error("a line of batch %s failed with %s", job.open_batch.batch.id, type(error).__qualname__)


def _delay_s(failure: ApiError, pause: float) -> float | None:
    """Returns the delay before the next attempt; None if it would not help or could charge tokens twice."""
    waits_for_tomorrow = failure.code == "daily_share_exhausted"
    if failure.status not in (429, 503) or (
        failure.headers.get("x-should-retry") == "false" and not waits_for_tomorrow
    ):
        return None
    return max(pause, float(failure.headers.get("retry-after", 0)))


async def _durably(work: Callable[[], T]) -> T:
    """Repeats a transaction until the database accepts it, because no result may be lost."""
    waits = pauses(FIRST_RETRY_S, LONGEST_RETRY_S)
    return await repeated(
        lambda: asyncio.to_thread(work), KeysUnavailable, waits, log=lambda error: logger.warning("%s", error)
    )
