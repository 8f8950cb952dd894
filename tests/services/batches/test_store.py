"""Claim: files and batches belong to one key, deletion removes them, and no result is lost or counted twice."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from sqlalchemy import make_url

from privmix.batches.records import Batch, LineResult
from privmix.batches.runner import _durably
from privmix.batches.store import Answered, BatchStore, LeaseLost, OpenBatch
from privmix.database.service import ServiceDatabase
from privmix.foundation.errors import BatchesError, NotStored
from tests.postgresql import Server
from tests.support.batches import DAY_S, HOLDER, TEXT, begin, put, result


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BatchStore:
    if request.param == "sqlite":
        return BatchStore(ServiceDatabase(tmp_path / "keys.db"), str(tmp_path / "files"))
    server: Server = request.getfixturevalue("postgresql")
    return BatchStore(
        ServiceDatabase(make_url(server.database()).render_as_string(hide_password=False)), str(tmp_path / "files")
    )


def answer(store: BatchStore, batch: Batch, number: int, result: LineResult) -> None:
    assert store.answer_lines("alice", batch.id, [Answered(number, result, (4, 2))]) == 1


def test_only_its_owner_can_read_a_file_until_it_is_deleted(store: BatchStore) -> None:
    file = put(store)
    assert store.content("alice", file.id) == TEXT
    assert store.file("alice", file.id) == file
    for method in (store.file, store.content, store.delete_file):
        with pytest.raises(NotStored):
            method("bob", file.id)
    store.delete_file("alice", file.id)
    with pytest.raises(NotStored):
        store.content("alice", file.id)


def test_lists_are_paginated(store: BatchStore) -> None:
    files = [put(store) for _ in range(5)]
    put(store, "bob")
    first = store.files("alice", None, None, 2, newest_first=True)
    assert (first.records, first.more) == (files[:2:-1], True)
    rest = store.files("alice", "batch", first.records[-1].id, 10, newest_first=True)
    assert (rest.records, rest.more) == (files[2::-1], False)
    assert store.files("alice", None, None, 10, newest_first=False).records == files
    assert store.files("alice", "batch_output", None, 10, newest_first=False).records == []
    with pytest.raises(NotStored):
        store.files("alice", None, "file-unknown", 10, newest_first=False)


def test_the_stored_bytes_of_a_key_are_limited(store: BatchStore) -> None:
    put(store, content=b"x" * 600)
    with pytest.raises(BatchesError, match="1000 bytes together") as refused:
        put(store, content=b"x" * 401)
    assert refused.value.code == "storage_full"
    put(store, "bob", content=b"x" * 1000)


def test_a_file_in_use_cannot_be_deleted_and_open_batches_are_limited(store: BatchStore) -> None:
    file = put(store)
    batches = [begin(store, file=file) for _ in range(3)]
    with pytest.raises(BatchesError, match="3 open batches"):
        begin(store, file=file)
    with pytest.raises(NotStored):
        begin(store, "bob", file)
    with pytest.raises(BatchesError, match="cancel it first"):
        store.delete_file("alice", file.id)
    for batch in batches:
        store.change(batch.id, status="cancelled")
    store.delete_file("alice", file.id)


def test_results_become_files_in_the_order_of_the_lines(store: BatchStore) -> None:
    batch = begin(store)
    batch = store.change(batch.id, status="in_progress")
    assert store.take_lease(HOLDER, 60)
    for number, status in ((3, 200), (1, 200), (2, 400)):
        assert store.begin_line(batch.id, number, HOLDER) == 1
        answer(store, batch, number, result(f"line {number}", status))
    assert store.begin_line(batch.id, 4, HOLDER) == 1
    assert store.begin_line(batch.id, 4, HOLDER) == 2, "a lost attempt counts"
    assert store.answered(batch.id) == {1, 2, 3}
    running = store.batch("alice", batch.id)
    assert (running.request_counts.completed, running.request_counts.failed) == (2, 1)
    (stored,) = store.open_batches()
    done = store.finish(stored, "expired", {4: "line 4"}, DAY_S, HOLDER)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("expired", 2, 2)
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (12, 6, 18)
    assert done.output_file_id is not None
    assert done.error_file_id is not None
    output = [json.loads(line) for line in store.content("alice", done.output_file_id).splitlines()]
    assert [line["custom_id"] for line in output] == ["line 1", "line 3"]
    refused, expired = (json.loads(line) for line in store.content("alice", done.error_file_id).splitlines())
    assert (refused["custom_id"], refused["response"]["status_code"], refused["error"]) == ("line 2", 400, None)
    assert (expired["custom_id"], expired["response"], expired["error"]["code"]) == ("line 4", None, "batch_expired")
    assert store.open_batches() == []
    assert store.change(batch.id, status="in_progress") == done, "a batch that has ended does not change"
    assert store.batch("alice", batch.id) == done


def test_one_deployment_runs_lines_at_a_time_and_the_first_result_of_a_line_stays(store: BatchStore) -> None:
    batch = begin(store)
    with pytest.raises(LeaseLost):
        store.begin_line(batch.id, 1, "old")
    assert store.take_lease("old", 60)
    assert store.begin_line(batch.id, 1, "old") == 1
    assert not store.take_lease("new", 60)
    with pytest.raises(LeaseLost):
        store.begin_line(batch.id, 1, "new")
    assert store.take_lease("old", 0)
    assert store.take_lease("new", 60), "the old deployment has not extended its lease"
    assert not store.take_lease("old", 60)
    with pytest.raises(LeaseLost):
        store.begin_line(batch.id, 2, "old")
    (stored,) = store.open_batches()
    with pytest.raises(LeaseLost):
        store.finish(stored, "completed", {}, DAY_S, "old")
    assert store.begin_line(batch.id, 1, "new") == 2
    answer(store, batch, 1, result("first"))
    answer(store, batch, 1, result("second"))
    done = store.finish(stored, "completed", {}, DAY_S, "new")
    assert done.output_file_id is not None
    assert json.loads(store.content("alice", done.output_file_id))["custom_id"] == "first"
    store.release_lease("new")
    assert store.take_lease("old", 60)


def test_files_and_batches_are_deleted_after_the_retention_time(store: BatchStore) -> None:
    now = int(time.time())
    old, read, fresh = put(store, expires_at=now - 1), put(store, expires_at=now - 1), put(store)
    batch, ended = begin(store, file=read), begin(store)
    store.change(ended.id, status="failed")
    store.purge(now, DAY_S)
    assert {file.id for file in store.files("alice", None, None, 10, newest_first=True).records} >= {read.id, fresh.id}
    with pytest.raises(NotStored):
        store.file("alice", old.id)
    store.purge(now + 2 * DAY_S, DAY_S)
    assert [batch.id for batch in store.batches("alice", None, 10).records] == [batch.id], "open batches stay"
    assert [file.id for file in store.files("alice", None, None, 10, newest_first=True).records] == [read.id]
    assert store.open_batches() == [OpenBatch("alice", batch, None)]


@pytest.mark.anyio
async def test_a_batch_continues_although_processes_of_its_database_hang(
    postgresql: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to wait for them for ever. Only the processes of earlier connections hang, so a new connection works."""
    monkeypatch.setattr("privmix.database.limited_connection.SILENCE_S", 2.0)
    store = BatchStore(ServiceDatabase(url := postgresql.database()), str(tmp_path / "files"))
    batch = begin(store)
    with postgresql.hanging_sessions(url):
        async with asyncio.timeout(30):
            assert (await _durably(lambda: store.batch("alice", batch.id))).id == batch.id
