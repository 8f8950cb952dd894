"""Claim: without a running service, a batch waits, can be cancelled, and survives a restart of the batches actor."""

import asyncio
import json
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from privmix.batches import actor
from privmix.batches.actor import Batches
from privmix.batches.records import Batch, BatchRequest
from privmix.batches.runner import RunningBatch
from privmix.batches.settings import BatchSettings
from privmix.batches.store import BatchStore, OpenBatch
from privmix.database import deadline
from privmix.foundation.errors import BatchesError, KeysUnavailable
from privmix.requests.settings import RequestSettings
from privmix.training import public_model
from tests.served import served

pytestmark = pytest.mark.anyio

BODY = {"model": "privmix", "prompt": "p", "max_tokens": 1}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY}


def start(place: Path, holder: str = "this") -> Batches:
    namespace = "a-namespace-without-actors"
    ensemble = served("privmix", namespace=namespace, model=public_model.resolve())
    requests = RequestSettings(namespace=namespace, ensemble=ensemble, keys_actor="keys")
    batches = Batches(str(place), BatchSettings(), pickle.dumps(requests), capacity=4, holder=holder)
    batches._route_serves.set()
    return batches


async def begin(batches: Batches, *, content: bytes | None = None) -> Batch:
    file = await batches.upload("alice", "in.jsonl", json.dumps(LINE).encode() if content is None else content, None)
    request = BatchRequest(endpoint="/v1/completions", input_file_id=file.id, completion_window="24h", window_s=86_400)
    return await batches.create("alice", request)


async def until(batches: Batches, id_: str, *statuses: str) -> Batch:
    async with asyncio.timeout(60):
        while (batch := await batches.batch("alice", id_)).status not in statuses:
            await asyncio.sleep(0.05)
    return batch


async def test_a_batch_waits_for_the_service_is_resumed_and_cancelled(tmp_path: Path) -> None:
    batches = start(tmp_path / "keys.db")
    batch = await until(batches, (await begin(batches)).id, "in_progress")
    assert (batch.request_counts.total, batch.request_counts.failed) == (1, 0)
    restarted = start(tmp_path / "keys.db")
    with pytest.raises(BatchesError, match="cancel it first"):
        await restarted.delete_file("alice", batch.input_file_id)
    await restarted.cancel("alice", batch.id)
    done = await until(restarted, batch.id, "cancelled")
    assert done.output_file_id is None
    assert done.error_file_id is not None
    (missing,) = (await restarted.content("alice", done.error_file_id)).splitlines()
    assert json.loads(missing)["error"]["code"] == "batch_cancelled"
    assert (await restarted.cancel("alice", batch.id)) == done, "a batch that has ended does not change"
    await restarted.delete_file("alice", batch.input_file_id)


def runs(batches: Batches, batch: Batch) -> bool:
    return batches._runner is not None and batch.id in batches._runner._jobs


async def test_a_new_deployment_runs_no_batch_before_it_serves_and_while_another_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open batch of the old deployment used to be resumed by the new one before it served, which took the ledger."""
    monkeypatch.setattr(actor, "LEASE_RENEWAL_S", 0.1)
    old = start(tmp_path / "keys.db", "old")
    batch = await until(old, (await begin(old)).id, "in_progress")
    new = start(tmp_path / "keys.db", "new")
    new._route_serves.clear()
    await asyncio.sleep(1.5)
    assert not runs(new, batch), "it does not serve yet"
    await new.serving()
    await asyncio.sleep(1.5)
    assert not runs(new, batch), "the old deployment runs the batches"
    second = await begin(new)
    await until(new, second.id, "in_progress")
    assert not runs(new, second), "the old deployment runs the new batch too"
    await new.cancel("alice", second.id)
    await until(new, second.id, "cancelled")
    await old.give_up()
    async with asyncio.timeout(60):
        while not runs(new, batch):
            await asyncio.sleep(0.05)
    await new.cancel("alice", batch.id)
    await until(new, batch.id, "cancelled")


async def test_a_line_whose_lease_ended_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another deployment may run the line then. It used to continue here too, so its tokens were charged twice."""
    monkeypatch.setattr(actor, "LEASE_RENEWAL_S", 0.1)
    batches = start(tmp_path / "keys.db")
    batch = await begin(batches)
    job = await running_job(batches, batch)
    job.generating |= job.workers  # charged already
    monkeypatch.setattr(batches._store, "take_lease", lambda holder, seconds: False)
    await asyncio.wait(job.workers, timeout=60)
    assert all(worker.cancelled() for worker in job.workers)
    assert (await batches.batch("alice", batch.id)).status == "in_progress", "it belongs to the other deployment"
    monkeypatch.undo()
    assert await running_job(batches, batch) is not job, "with the lease, it continues"


async def test_an_error_that_nobody_foresaw_stops_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to end the loop that continues open batches, until the actor was restarted."""
    monkeypatch.setattr(actor, "LEASE_RENEWAL_S", 0.1)
    batch = await begin(start(tmp_path / "keys.db"))
    failures = iter((ValueError("a row of a later version"),))

    def open_batches(store: BatchStore) -> list[OpenBatch]:
        for failure in failures:
            raise failure
        return unpatched(store)

    unpatched = BatchStore.open_batches
    monkeypatch.setattr(BatchStore, "open_batches", open_batches)
    assert await running_job(start(tmp_path / "keys.db"), batch), "in a later round of the restarted actor"
    assert next(failures, None) is None


async def test_a_line_ends_with_its_lease_while_the_database_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "LEASE_RENEWAL_S", 0.1)
    monkeypatch.setattr(actor, "LEASE_S", 3)
    batches = start(tmp_path / "keys.db")
    job = await running_job(batches, await begin(batches))
    monkeypatch.setattr(deadline, "DATABASE_TIMEOUT_S", 0.3)  # which a busy machine may need while the database works
    with closing(sqlite3.connect(tmp_path / "keys.db", isolation_level=None)) as hanging:
        hanging.execute("BEGIN EXCLUSIVE")
        with pytest.raises(KeysUnavailable, match="does not answer"):
            await batches.batches("alice", None, 10)
        done, _ = await asyncio.wait(job.workers, timeout=60)
        assert done == job.workers
        hanging.execute("ROLLBACK")


async def running_job(batches: Batches, batch: Batch) -> RunningBatch:
    """Returns the batch's job once its line runs. Without a service, the line is tried again and again."""
    async with asyncio.timeout(60):
        while not (batches._runner and (job := batches._runner._jobs.get(batch.id)) and job.workers):
            await asyncio.sleep(0.02)
    return job


async def test_a_file_without_requests_fails_its_batch(tmp_path: Path) -> None:
    batches = start(tmp_path / "keys.db")
    failed = await until(batches, (await begin(batches, content=b"x")).id, "failed")
    assert failed.errors is not None
    assert [(error.code, error.line) for error in failed.errors.data] == [("invalid_json_line", 1)]
