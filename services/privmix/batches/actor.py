"""Implements the Ray actor that stores files and runs batches of requests in the background.

It alone writes and reads the contents of files. It runs on the head node.
"""

import asyncio
import logging
import pickle
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar
from uuid import uuid4

import ray
from ray.actor import ActorHandle

from privmix.batches.contents import default_place
from privmix.batches.records import Batch, BatchRequest, File, new_id
from privmix.batches.settings import BatchSettings
from privmix.batches.store import BatchStore, OpenBatch
from privmix.database.deadline import in_time
from privmix.database.service import ServiceDatabase
from privmix.foundation.actors import HEAD, forwarded
from privmix.foundation.periodic import periodically
from privmix.keys.fair_queue import background_capacity

if TYPE_CHECKING:
    from privmix.batches.runner import Runner
    from privmix.requests.settings import RequestSettings

NAME = "batches"
MAX_OPEN = 50
"""The number of open batches that one key may have."""
MAX_WRITING = 2
"""The number of uploads that are written at the same time. The others wait, so that threads are left for the rest."""
PURGE_S = 60.0
SWEEP_S = 3600.0
LEASE_S = 30
LEASE_RENEWAL_S = 5.0
CLOCK_S = 1
"""The resolution of the database's clock, by which a lease may end early."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Batches:
    """Stores files and batches. A restarted actor continues the open batches.

    Loads the runner with its tokenizers (seconds of work and 600 MB) only when a batch exists.

    Args:
        requests: the pickled `RequestSettings`. Unpickling them imports the tokenizers, so it waits until then too.
        capacity: the number of generations that the coordinators run at the same time.
        holder: the name of the deployment, which does not change when the actor restarts. Only the deployment with the
            lease in the database runs batches, and only once its HTTP route serves (`serving`): a new deployment must
            not charge tokens, and so take over the ledger, while the clients still use the old one.
    """

    def __init__(self, database: str, settings: BatchSettings, requests: bytes, capacity: int, holder: str) -> None:
        self._settings = settings
        self._holder = holder
        self._route_serves = asyncio.Event()
        self._store = BatchStore(ServiceDatabase(database), settings.files or default_place(database))
        self._writing = asyncio.Semaphore(MAX_WRITING)
        self._requests = requests
        self._capacity = background_capacity(capacity)
        self._runner: Runner | None = None
        self._lapse: asyncio.TimerHandle | None = None
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = {
            asyncio.get_running_loop().create_task(periodically(work, pause_s, failure))
            for work, pause_s, failure in (
                (self._continue_open, LEASE_RENEWAL_S, "open batches could not be continued"),
                (self._purge, PURGE_S, "expired files and batches could not be deleted"),
                (self._sweep, SWEEP_S, "files without an owner could not be deleted"),
            )
        }

    async def ready(self) -> None:
        """Returns when the database and the place of the files are open."""

    async def serving(self) -> None:
        """Records that a gateway of this deployment serves. Gateways call it every few seconds."""
        self._route_serves.set()

    async def give_up(self) -> None:
        """Gives up the lease before this actor is stopped."""
        self._route_serves.clear()
        await self._do(lambda store: store.release_lease(self._holder))

    async def upload(self, owner: str, filename: str, content: bytes, expires_s: int | None) -> File:
        """Stores an input file for `expires_s` seconds or the retention time, whichever is shorter.

        Raises:
            BatchesError: see `BatchStore.put_file`.
            KeysUnavailable: the database or the place of the files cannot be used.
        """
        now, retention_s = int(time.time()), self._settings.retention_s
        file = File(
            id=new_id("file-"),
            bytes=len(content),
            created_at=now,
            expires_at=now + min(expires_s or retention_s, retention_s),
            filename=filename,
            purpose="batch",
        )
        limits = self._settings.max_stored_bytes, self._settings.max_files
        async with self._writing:
            return await asyncio.to_thread(self._store.put_file, owner, file, content, *limits)

    async def _do(self, work: Callable[[BatchStore], T]) -> T:
        """Runs a transaction in a thread (`in_time`)."""
        return await in_time(asyncio.ensure_future(asyncio.to_thread(work, self._store)))

    file = forwarded(_do, BatchStore.file)
    content = forwarded(_do, BatchStore.content)
    files = forwarded(_do, BatchStore.files)
    delete_file = forwarded(_do, BatchStore.delete_file)
    batch = forwarded(_do, BatchStore.batch)
    batches = forwarded(_do, BatchStore.batches)

    async def create(self, owner: str, request: BatchRequest) -> Batch:
        """Creates a batch and starts to validate its file.

        Raises:
            BatchesError: see `BatchStore.put_batch`.
        """
        now = int(time.time())
        batch = Batch(
            id=new_id("batch_"),
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + request.window_s,
            metadata=request.metadata,
        )
        await self._do(lambda store: store.put_batch(owner, batch, request.output_expires_s, MAX_OPEN))
        if await self._may_run():
            self._begin(OpenBatch(owner, batch, request.output_expires_s))
        return batch

    async def cancel(self, owner: str, id_: str) -> Batch:
        """Starts no more lines of a batch, which ends after the running ones. Does not change a batch that has ended.

        Raises:
            NotStored: the owner has no such batch.
        """
        batch = await self._do(lambda store: store.batch(owner, id_))
        if batch.status in ("validating", "in_progress"):
            changes = {"status": "cancelling", "cancelling_at": int(time.time())}
            await self._do(lambda store: store.change(id_, **changes))
            if self._runner is not None:
                self._runner.cancel(id_)
        return await self._do(lambda store: store.batch(owner, id_))

    def _begin(self, open_batch: OpenBatch) -> None:
        """Runs an open batch once the runner is loaded."""

        async def begin() -> None:
            (await self._loaded_runner()).start(open_batch)

        task = asyncio.get_running_loop().create_task(begin())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _loaded_runner(self) -> "Runner":
        async with self._loading:
            if self._runner is None:
                runner = await asyncio.to_thread(self._load)
                self._tasks.add(asyncio.get_running_loop().create_task(runner.serve()))
                self._runner = runner
        return self._runner

    def _load(self) -> "Runner":
        from privmix.batches.runner import Runner

        requests: RequestSettings = pickle.loads(self._requests)
        return Runner.load(self._store, self._settings, requests, self._capacity, self._holder)

    async def _may_run(self) -> bool:
        """Takes or extends the lease. Returns whether this deployment runs batches.

        Lines that run are cancelled once the lease ends, because another deployment may run them then.
        """
        if not self._route_serves.is_set():
            return False
        loop = asyncio.get_running_loop()
        asked = loop.time()
        held = await self._do(lambda store: store.take_lease(self._holder, LEASE_S))
        if self._lapse is not None:
            self._lapse.cancel()
        if held:
            self._lapse = loop.call_at(asked + LEASE_S - CLOCK_S, self._abandon)
        else:
            self._abandon()
        return held

    def _abandon(self) -> None:
        if self._runner is not None:
            self._runner.abandon()

    async def _continue_open(self) -> None:
        """Runs the open batches if this deployment has the lease."""
        await self._route_serves.wait()
        if not await self._may_run():
            return
        for open_batch in await self._do(BatchStore.open_batches):
            if open_batch.batch.status == "cancelling" and self._runner is not None:
                self._runner.cancel(open_batch.batch.id)  # another deployment cancelled it
            self._begin(open_batch)

    async def _purge(self) -> None:
        await self._do(lambda store: store.purge(int(time.time()), self._settings.retention_s))

    async def _sweep(self) -> None:
        await self._do(BatchStore.sweep)


BatchesActor = ray.remote(num_cpus=0, resources=HEAD, max_restarts=-1, max_task_retries=0, max_concurrency=256)(Batches)


def start(
    database: str,
    settings: BatchSettings,
    requests: "RequestSettings",
    *,
    capacity: int,
    lifetime: Literal["detached"] | None = None,
    keep: bool = False,
) -> ActorHandle:
    """Starts the batches actor and waits until its database is open.

    Args:
        keep: reuse a living actor.
    """
    options = {"name": NAME, "namespace": requests.namespace, "lifetime": lifetime, "get_if_exists": keep}
    actor = BatchesActor.options(**options).remote(database, settings, pickle.dumps(requests), capacity, uuid4().hex)
    ray.get(actor.ready.remote())
    return actor
