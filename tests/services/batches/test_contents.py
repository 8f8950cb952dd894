"""Claim: contents are outside the database, and whatever a crash leaves of a change is completed or removed."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import Connection, text

from privmix.batches import store as batches_store
from privmix.batches.contents import Contents, DirectoryContents, ObjectContents, contents_at, default_place
from privmix.batches.records import Batch, File, new_id
from privmix.batches.store import DELETING, Answered, BatchStore, OpenBatch
from privmix.database.database import Database
from privmix.database.service import _KEYS, ServiceDatabase, migrations
from privmix.foundation.errors import BatchesError, ConfigurationError, FilesUnavailable, NotStored
from tests.support.batches import begin, put, result

DAY_S = 86_400


class Crash(Exception):  # noqa: N818 (it says what happens)
    """The process ended here."""


def crash(*_: object) -> None:
    raise Crash


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return BatchStore(ServiceDatabase(tmp_path / "keys.db"), str(tmp_path / "files"))


@pytest.fixture(params=["directory", "object store"])
def contents(request: pytest.FixtureRequest, tmp_path: Path) -> Contents:
    place = str(tmp_path) if request.param == "directory" else f"memory://{tmp_path.name}"
    return contents_at(place, "database")


def test_both_kinds_of_places_store_contents(contents: Contents) -> None:
    assert isinstance(contents, DirectoryContents | ObjectContents)
    assert contents.ids() == set()
    assert contents.read("file-1") is None
    contents.delete("file-1")
    contents.write("file-1", b"old")
    contents.write("file-1", b"new")
    contents.write("file-2", b"\0" * 1000)
    assert contents.read("file-1") == b"new"
    assert contents.ids() == {"file-1", "file-2"}
    contents.delete("file-1")
    assert contents.ids() == {"file-2"}


def test_only_this_user_can_read_a_directory(tmp_path: Path) -> None:
    contents_at(str(tmp_path / "files"), "database").write("file-1", b"prompts")
    assert (tmp_path / "files" / "database").stat().st_mode & 0o077 == 0
    assert (tmp_path / "files" / "database" / "file-1").stat().st_mode & 0o077 == 0


def test_a_missing_volume_loses_no_content(tmp_path: Path) -> None:
    contents = contents_at(str(tmp_path / "files"), "database")
    (tmp_path / "files" / "database").rmdir()
    with pytest.raises(FilesUnavailable, match=r"batches\.files"):
        contents.read("file-1")
    with pytest.raises(FilesUnavailable, match=r"batches\.files"):
        contents_at("nothing-of-this-kind://x", "database")


def test_the_default_place_is_beside_a_file_and_a_server_needs_one() -> None:
    assert default_place("/data/keys.db") == "/data/files"
    with pytest.raises(ConfigurationError, match=r"batches\.files"):
        default_place("postgresql://host/base")


def ids(store: BatchStore, owner: str = "alice") -> set[str]:
    return {file.id for file in store.files(owner, None, None, 100, newest_first=True).records}


def later(store: BatchStore, seconds: int) -> None:
    store.purge(int(time.time()) + seconds, 10 * DAY_S)


def rows(store: BatchStore, table: str) -> int:
    with store._database.transaction() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())


def test_the_database_stores_no_content(store: BatchStore, tmp_path: Path) -> None:
    file = put(store)
    assert store._contents.ids() == {file.id}
    assert rows(store, "privmix_file_contents") == 0
    store.delete_file("alice", file.id)
    assert store._contents.ids() == set()
    assert rows(store, "privmix_files") == 0


@pytest.mark.parametrize("step", ["before", "after"])
def test_a_crash_while_a_file_is_uploaded(store: BatchStore, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    if step == "before":
        monkeypatch.setattr(store._contents, "write", crash)
    else:
        monkeypatch.setattr(batches_store, "_confirm", crash)
    with pytest.raises(Crash):
        put(store, content=b"x" * 600)
    monkeypatch.undo()
    assert ids(store) == set(), "nobody was told of it"
    with pytest.raises(BatchesError, match="bytes together"):
        put(store, content=b"x" * 600)  # what may be on disk counts
    later(store, 3700)
    assert (store._contents.ids(), rows(store, "privmix_files")) == (set(), 0)
    put(store, content=b"x" * 600)


@pytest.mark.parametrize("step", ["before", "after"])
def test_a_crash_while_a_file_is_deleted(store: BatchStore, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    file, delete = put(store), store._contents.delete

    def half(id_: str) -> None:
        if step == "after":
            delete(id_)
        raise Crash

    monkeypatch.setattr(store._contents, "delete", half)
    with pytest.raises(Crash):
        store.delete_file("alice", file.id)
    monkeypatch.undo()
    with pytest.raises(NotStored):
        store.content("alice", file.id)
    later(store, 0)
    assert (store._contents.ids(), rows(store, "privmix_files")) == (set(), 0)


def test_a_failed_write_does_not_count_for_an_hour(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise FilesUnavailable("no space is left")

    monkeypatch.setattr(store._contents, "write", full)
    with pytest.raises(FilesUnavailable):
        put(store, content=b"x" * 600)
    monkeypatch.undo()
    later(store, 0)
    put(store, content=b"x" * 600)


def test_a_content_that_arrives_after_its_time_is_refused(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write = store._contents.write

    def slow(id_: str, content: bytes) -> None:
        later(store, 3700)
        write(id_, content)

    monkeypatch.setattr(store._contents, "write", slow)
    with pytest.raises(FilesUnavailable, match="upload it again"):
        put(store)
    assert ids(store) == set()


def test_a_lost_content_is_told_and_its_file_can_be_deleted(store: BatchStore) -> None:
    file = put(store)
    store._contents.delete(file.id)
    with pytest.raises(NotStored) as lost:
        store.content("alice", file.id)
    assert lost.value.code == "file_content_lost"
    store.delete_file("alice", file.id)
    assert ids(store) == set()


def test_contents_without_a_row_are_removed_after_a_day_and_no_others(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    file = put(store)
    store._contents.write("file-of-a-lost-row", b"x")
    store._contents.write(".file-1.half", b"x")
    store.sweep()
    clock[0] += 80_000
    store.sweep()
    assert len(store._contents.ids()) == 3, "an operator may restore the right backup until then"
    clock[0] += 7_000
    store.sweep()
    assert store._contents.ids() == {file.id}


def test_a_crash_while_a_batch_ends_writes_its_results_once(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = begin(store)
    assert store.take_lease("me", 10**6)
    (stored,) = store.open_batches()
    monkeypatch.setattr(batches_store, "_confirm", crash)
    with pytest.raises(Crash):
        store.finish(stored, "expired", {1: "line 1"}, DAY_S, "me")
    monkeypatch.undo()
    done = store.finish(stored, "expired", {1: "line 1"}, DAY_S, "me")
    assert ids(store) == {batch.input_file_id, done.error_file_id}
    later(store, 3700)
    assert store._contents.ids() == ids(store)


def running(store: BatchStore, lines: int = 3) -> OpenBatch:
    """Returns an open batch whose lines have begun."""
    batch = begin(store)
    assert store.take_lease("me", 10**6)
    for number in range(1, lines + 1):
        store.begin_line(batch.id, number, "me")
    (stored,) = store.open_batches()
    return stored


def answers(*numbers: int) -> list[Answered]:
    return [Answered(number, result(f"line {number}", 400 if number == 3 else 200), (4, 2)) for number in numbers]


CUSTOM_IDS = {number: f"line {number}" for number in range(1, 4)}


def delivered(store: BatchStore, done: Batch) -> dict[str, dict[str, Any]]:
    """Returns the lines of both files of a batch by custom id, and checks what the batch says of them."""
    files = {"completed": done.output_file_id, "failed": done.error_file_id}
    read = {kind: store.content("alice", id_).splitlines() if id_ else [] for kind, id_ in files.items()}
    assert {kind: len(lines) for kind, lines in read.items()} == done.request_counts.model_dump(exclude={"total"})
    lines = [json.loads(line) for line in (*read["completed"], *read["failed"])]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == len(lines)
    return by_id


def test_the_results_of_a_running_batch_are_outside_the_database(store: BatchStore) -> None:
    stored = running(store)
    assert store.answer_lines("alice", stored.batch.id, answers(1, 3)) == 2
    parts = store._contents.ids() - {stored.batch.input_file_id}
    assert len(parts) == 1
    with store._database.transaction() as connection:
        kept = connection.execute(text("SELECT number, result, part FROM privmix_batch_lines ORDER BY number")).all()
    assert [tuple(row) for row in kept] == [(1, None, *parts), (2, None, None), (3, None, *parts)]
    assert ids(store) == {stored.batch.input_file_id}, "nobody is shown a part"
    with pytest.raises(NotStored):
        store.content("alice", *parts)
    with pytest.raises(BatchesError, match="bytes together"):
        put(store, content=b"x" * 900)  # it counts as stored
    store.purge(int(time.time()) + 40 * DAY_S, DAY_S)
    assert parts <= store._contents.ids(), "it stays as long as the batch is open"
    assert store.answer_lines("alice", stored.batch.id, answers(2)) == 1
    done = store.finish(stored, "completed", CUSTOM_IDS, DAY_S, "me")
    assert delivered(store, done).keys() == set(CUSTOM_IDS.values())
    assert store._contents.ids() - {stored.batch.input_file_id} == {done.output_file_id, done.error_file_id}
    assert rows(store, "privmix_batch_lines") == 0


def test_a_part_is_bounded_and_parts_are_no_files_of_their_key(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_store, "PART_BYTES", 1)
    stored = running(store, 12)
    numbers = list(range(1, 13))
    while numbers:
        assert store.answer_lines("alice", stored.batch.id, answers(*numbers)) == 1
        numbers.pop(0)
    assert len(store._contents.ids()) == 13
    file = File(id=new_id("file-"), bytes=1, created_at=0, expires_at=2**33, filename="f", purpose="batch")
    store.put_file("alice", file, b"x", 10**6, 2)


@pytest.mark.parametrize("step", ["the row", "the content", "the lines"])
def test_a_crash_while_results_are_stored(store: BatchStore, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    stored = running(store)
    if step == "the row":
        monkeypatch.setattr(batches_store, "_insert_file", crash)
    elif step == "the content":
        monkeypatch.setattr(store._contents, "write", crash)
    else:
        write = store._contents.write
        monkeypatch.setattr(store._contents, "write", lambda *arguments: crash(write(*arguments)))
    with pytest.raises(Crash):
        store.answer_lines("alice", stored.batch.id, answers(1, 2))
    monkeypatch.undo()
    assert store.answered(stored.batch.id) == set(), "no line counts before its result is stored"
    assert store.answer_lines("alice", stored.batch.id, answers(1, 3)) == 2
    later(store, 3700)
    assert len(store._contents.ids()) == 2, "what no line names is removed after its time"
    done = store.finish(stored, "expired", CUSTOM_IDS, DAY_S, "me")
    lines = delivered(store, done)
    assert lines["line 2"]["error"]["code"] == "batch_expired"
    assert done.usage is not None
    assert done.usage.output_tokens == 4


def test_results_that_arrive_after_their_time_are_written_again(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, write = running(store), store._contents.write

    def slow(id_: str, content: bytes) -> None:
        later(store, 3700)
        write(id_, content)

    monkeypatch.setattr(store._contents, "write", slow)
    with pytest.raises(FilesUnavailable, match="in time"):
        store.answer_lines("alice", stored.batch.id, answers(1))
    assert store.answered(stored.batch.id) == set()


@pytest.mark.parametrize("step", ["the rows", "the contents", "the end", "the parts"])
def test_a_crash_while_the_parts_of_a_batch_become_its_files(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    stored = running(store)
    store.answer_lines("alice", stored.batch.id, answers(1, 2, 3))
    place: tuple[Any, str] = {
        "the rows": (batches_store, "_insert_file"),
        "the contents": (store._contents, "write"),
        "the end": (batches_store, "_change"),
        "the parts": (store._contents, "delete"),
    }[step]
    monkeypatch.setattr(*place, crash)
    with pytest.raises(Crash):
        store.finish(stored, "completed", CUSTOM_IDS, DAY_S, "me")
    monkeypatch.undo()
    ended = not store.open_batches()
    assert ended == (step == "the parts")
    done = (
        store.batch("alice", stored.batch.id) if ended else store.finish(stored, "completed", CUSTOM_IDS, DAY_S, "me")
    )
    assert delivered(store, done).keys() == set(CUSTOM_IDS.values())
    later(store, 3700)
    assert store._contents.ids() == {stored.batch.input_file_id, done.output_file_id, done.error_file_id}
    assert rows(store, "privmix_files") == 3


@pytest.mark.parametrize("content", [None, b"", b"1 {\xff", b"no number"])
def test_an_answer_that_is_lost_is_named_with_its_tokens(store: BatchStore, content: bytes | None) -> None:
    stored = running(store)
    for group in (answers(1, 3), answers(2)):
        store.answer_lines("alice", stored.batch.id, group)
    with store._database.transaction() as connection:
        part = connection.execute(text("SELECT part FROM privmix_batch_lines WHERE number = 1")).scalar_one()
    store._contents.delete(part)
    if content is not None:
        store._contents.write(part, content)
    done = store.finish(stored, "completed", CUSTOM_IDS, DAY_S, "me")
    lines = delivered(store, done)
    assert lines["line 2"]["response"]["status_code"] == 200
    for number in (1, 3):
        lost = lines[f"line {number}"]["response"]
        assert (lost["status_code"], lost["body"]["error"]["code"]) == (500, "answer_lost")
        assert lost["body"]["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    assert done.usage is not None
    assert done.usage.output_tokens == 6


def test_a_result_of_an_earlier_version_is_delivered(store: BatchStore) -> None:
    stored = running(store, 2)
    (earlier_one, later_one) = answers(1, 2)
    store.answer_lines("alice", stored.batch.id, [later_one])
    with store._database.transaction() as connection:
        values = {"result": earlier_one.result.text()}
        connection.execute(
            text(
                "UPDATE privmix_batch_lines SET result = :result, goes_to = 'output', prompt_tokens = 4,"
                " completion_tokens = 2 WHERE number = 1"
            ),
            values,
        )
    done = store.finish(stored, "completed", {1: "line 1", 2: "line 2"}, DAY_S, "me")
    assert delivered(store, done).keys() == {"line 1", "line 2"}


def test_ended_batches_expire_by_their_end_and_by_their_number(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_store, "MAX_ENDED", 3)
    file = put(store)
    for _ in range(6):
        store.change(begin(store, file=file).id, status="failed")
    last = store.batches("alice", None, 100).records
    assert len(last) == 3
    now = int(time.time())
    with store._database.transaction() as connection:
        connection.execute(text("UPDATE privmix_batches SET created = 0"))
    store.purge(now, DAY_S)
    assert {batch.id for batch in store.batches("alice", None, 100).records} == {batch.id for batch in last}, (
        "they ran for longer than the retention time"
    )
    store.purge(now + DAY_S + 10, DAY_S)
    assert store.batches("alice", None, 100).records == []


def test_the_number_of_files_is_limited(store: BatchStore) -> None:
    for _ in range(10):
        put(store, content=b"x")
    with pytest.raises(BatchesError, match="10 files") as refused:
        put(store, content=b"x")
    assert refused.value.code == "too_many_files"


def earlier(connection: Connection) -> None:
    """Creates a database of an earlier version with two files."""
    configuration = migrations._configuration()
    configuration.attributes |= {"connection": connection, "revision_table": migrations.revision_table}
    command.upgrade(configuration, "0001")
    for id_, content in (("file-1", b"one"), ("file-2", b"\0two")):
        file = File(id=id_, bytes=len(content), created_at=1, expires_at=10**10, filename="f", purpose="batch")
        values = {"id": id_, "record": file.model_dump_json(), "bytes": len(content), "content": content}
        insert = "INSERT INTO privmix_files VALUES (:id, 'alice', 1, 10000000000, :bytes, :record, :content)"
        connection.execute(text(insert), values)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_the_contents_of_earlier_versions_move_out(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tmp_path / "keys.db") if kind == "sqlite" else request.getfixturevalue("postgresql").database()
    with Database(place, "create", _KEYS).transaction() as connection:
        earlier(connection)
    move: Callable[[BatchStore], bool] = BatchStore._move_one_out
    with monkeypatch.context() as patched:
        moves: Iterator[Callable[[BatchStore], object]] = iter([move, crash])
        patched.setattr(BatchStore, "_move_one_out", lambda self: next(moves)(self))
        with pytest.raises(Crash):
            BatchStore(ServiceDatabase(place), str(tmp_path / "files"))
    moved = BatchStore(ServiceDatabase(place), str(tmp_path / "files"))
    assert (moved.content("alice", "file-1"), moved.content("alice", "file-2")) == (b"one", b"\0two")
    assert rows(moved, "privmix_file_contents") == 0
    moved.delete_file("alice", "file-1")
    assert (ids(moved), moved._contents.ids()) == ({"file-2"}, {"file-2"})


def test_an_id_names_no_other_file(store: BatchStore, tmp_path: Path) -> None:
    (tmp_path / "files" / "secret").write_bytes(b"x")
    with pytest.raises(NotStored):
        store.content("alice", "../secret")
    assert new_id("file-").isascii()
    assert DELETING not in ids(store)
