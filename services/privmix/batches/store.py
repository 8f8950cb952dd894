"""Stores files, batches and the results of their lines.

What a method changes is on disk when the method returns. Each row belongs to one owner and does not exist for others.

The content of a file is not in the database (`contents`), so two stores change, one after the other, and either change
may be the last before a crash. A file's row is there before its content and leaves after it: until then it is in the
state "writing" or "deleting", in which it is not shown and counts as stored. So no content is without a row, except
where the database lost rows, as by the restoration of a backup; `sweep` deletes what is left over.

The results of an open batch are in parts: contents with the state "part", each with the results of some lines. The rows
of these lines name their part, and their results count as stored from then on.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, delete, func, insert, select, update

from privmix.batches.contents import contents_at
from privmix.batches.records import (
    OPEN,
    Batch,
    BatchUsage,
    Ending,
    File,
    LineError,
    LineResponse,
    LineResult,
    RequestCounts,
    new_id,
)
from privmix.database.clock import unix_time
from privmix.database.service import (
    ServiceDatabase,
    batch_lease_table,
    batch_lines_table,
    batches_table,
    file_contents_table,
    files_table,
    service_table,
)
from privmix.foundation.errors import BatchesError, FilesUnavailable, NotStored

OUTPUT, ERRORS = "output", "errors"
_FIELDS = {OUTPUT: "output_file_id", ERRORS: "error_file_id"}
WRITING, STORED, DELETING, PART = "writing", "stored", "deleting", "part"
WRITING_S = 3600
"""A content that is not written after this time never will be."""
PART_BYTES = 16 << 20
"""A part gets no more results once it has this many bytes."""
MAX_DELETED = 1_000
"""The number of files that one call of `purge` deletes."""
ORPHAN_S = 86_400.0
MAX_ENDED = 1_000
"""The number of ended batches that one key may have. The oldest of them makes room for another."""


@dataclass(frozen=True)
class Page:
    """Holds a page of a list, and whether more records follow it."""

    records: Sequence[Any]
    more: bool


@dataclass(frozen=True)
class OpenBatch:
    """Holds a batch that has not ended, and its owner."""

    owner: str
    batch: Batch
    output_expires_s: int | None


@dataclass(frozen=True)
class Answered:
    """Holds the result of a line that was begun.

    Attributes:
        number: the number of the line in the input file.
        usage: the prompt and completion tokens.
    """

    number: int
    result: LineResult
    usage: tuple[int, int]

    @property
    def goes_to(self) -> str:
        """The file that the result belongs to."""
        response = self.result.response
        return OUTPUT if response is not None and response.status_code < 400 else ERRORS


@dataclass(frozen=True)
class _Outcome:
    """Holds the lines of the files of a batch, by file, and the number of lines whose stored answers are lost."""

    lines: Mapping[str, Sequence[str]]
    lost: int

    def content(self, kind: str) -> bytes:
        return "".join(f"{line}\n" for line in self.lines[kind]).encode()


class LeaseLost(Exception):  # noqa: N818 (the name says the state)
    """Another deployment runs the batches."""


class BatchStore:
    """Owns the tables of files and batches.

    Several deployments may open the database, as during an upgrade. Only the one with the lease runs lines.
    """

    def __init__(self, database: ServiceDatabase, files: str) -> None:
        """Opens the tables, and moves contents out that earlier versions stored in them.

        Args:
            files: the place of the contents (`contents_at`).

        Raises:
            KeysUnavailable: the database or the place cannot be used.
        """
        self._database = database
        with database.transaction() as connection:
            id_: str = connection.execute(select(service_table.c.id)).scalar_one()
        self._contents = contents_at(files, id_)
        self._orphans: dict[str, float] = {}
        """When `sweep` first saw each content without a row, by the monotonic clock."""
        while self._move_one_out():
            pass

    def put_file(self, owner: str, file: File, content: bytes, most_stored: int, most_files: int) -> File:
        """Stores a file.

        Raises:
            BatchesError: the owner would have more than `most_stored` bytes or `most_files` files.
        """
        with self._database.transaction() as connection:
            shown = files_table.c.owner == owner, files_table.c.state != PART
            files = connection.execute(select(func.count()).select_from(files_table).where(*shown)).scalar_one()
            used = _stored(connection, owner)
            if used + len(content) > most_stored:
                message = f"file: the files of this key may have {most_stored} bytes together; delete some files"
                raise BatchesError(message, "storage_full", "file")
            if files >= most_files:
                message = f"file: this key may have {most_files} files; delete some files"
                raise BatchesError(message, "too_many_files", "file")
            _insert_file(connection, owner, file, WRITING)
        try:
            self._contents.write(file.id, content)
        except FilesUnavailable:
            with self._database.transaction() as connection:  # `purge` deletes what was written of it
                connection.execute(update(files_table).where(files_table.c.id == file.id).values(state=DELETING))
            raise
        with self._database.transaction() as connection:
            if not _confirm(connection, [file.id]):
                raise FilesUnavailable("the file was not written in time; upload it again")
        return file

    def stored(self, owner: str) -> int:
        """Returns the bytes of all files of an owner, and of the results of its open batches."""
        with self._database.transaction() as connection:
            return _stored(connection, owner)

    def file(self, owner: str, id_: str) -> File:
        """Returns the description of a file.

        Raises:
            NotStored: the owner has no such file.
        """
        with self._database.transaction() as connection:
            return _file(connection, owner, id_)

    def content(self, owner: str, id_: str) -> bytes:
        """Returns the content of a file.

        Raises:
            NotStored: the owner has no such file, or its content is lost.
        """
        self.file(owner, id_)
        content = self._contents.read(id_)
        if content is None:
            raise NotStored("the content of this file is lost; delete the file", "file_content_lost")
        return content

    def files(self, owner: str, purpose: str | None, after: str | None, limit: int, *, newest_first: bool) -> Page:
        """Returns a page of the owner's files that starts after the file with the id `after`."""
        with self._database.transaction() as connection:
            rows = _of_owner(connection, files_table, owner, newest_first=newest_first)
        files = [File.model_validate_json(row) for row in rows]
        return _page([file for file in files if purpose in (None, file.purpose)], after, limit)

    def delete_file(self, owner: str, id_: str) -> None:
        """Deletes a file and its content.

        Raises:
            NotStored: the owner has no such file.
            BatchesError: an open batch reads the file.
        """
        with self._database.transaction() as connection:
            _file(connection, owner, id_)
            readers = batches_table.c.input_file_id == id_, batches_table.c.status.in_(OPEN)
            if (batch := connection.execute(select(batches_table.c.id).where(*readers)).scalar()) is not None:
                raise BatchesError(f"the batch {batch} reads this file; cancel it first", "file_in_use")
            connection.execute(update(files_table).where(files_table.c.id == id_).values(state=DELETING))
        self._delete([id_])

    def put_batch(self, owner: str, batch: Batch, output_expires_s: int | None, most_open: int) -> None:
        """Stores a new batch.

        Raises:
            NotStored: the owner has no such input file.
            BatchesError: the file is not an input file, or the owner has too many open batches.
        """
        with self._database.transaction() as connection:
            if _file(connection, owner, batch.input_file_id, "input_file_id").purpose != "batch":
                raise BatchesError("input_file_id: upload a file with the purpose batch", param="input_file_id")
            mine = batches_table.c.owner == owner, batches_table.c.status.in_(OPEN)
            open_batches = connection.execute(select(func.count()).select_from(batches_table).where(*mine)).scalar_one()
            if open_batches >= most_open:
                raise BatchesError(
                    f"this key has {most_open} open batches; wait until one ends or cancel one", "too_many_batches"
                )
            _forget_ended(connection, owner, MAX_ENDED - 1)
            connection.execute(
                insert(batches_table).values(
                    id=batch.id,
                    owner=owner,
                    created=time.time_ns() // 1000,
                    status=batch.status,
                    input_file_id=batch.input_file_id,
                    output_expires_s=output_expires_s,
                    record=batch.model_dump_json(),
                )
            )

    def batch(self, owner: str, id_: str) -> Batch:
        """Returns a batch with the current counts of its requests.

        Raises:
            NotStored: the owner has no such batch.
        """
        with self._database.transaction() as connection:
            return _counted(connection, _batch(connection, owner, id_))

    def batches(self, owner: str, after: str | None, limit: int) -> Page:
        """Returns a page of the owner's batches, newest first, that starts after the batch with the id `after`."""
        with self._database.transaction() as connection:
            rows = _of_owner(connection, batches_table, owner, newest_first=True)
            page = _page([Batch.model_validate_json(row) for row in rows], after, limit)
            return Page([_counted(connection, batch) for batch in page.records], page.more)

    def open_batches(self) -> list[OpenBatch]:
        """Returns all batches that have not ended, oldest first."""
        columns = batches_table.c.owner, batches_table.c.record, batches_table.c.output_expires_s
        query = select(*columns).where(batches_table.c.status.in_(OPEN)).order_by(batches_table.c.created)
        with self._database.transaction() as connection:
            rows = connection.execute(query).all()
        return [OpenBatch(row.owner, Batch.model_validate_json(row.record), row.output_expires_s) for row in rows]

    def change(self, batch_id: str, **changes: Any) -> Batch:
        """Changes an open batch and returns it. Does not change a batch that has ended."""
        with self._database.transaction() as connection:
            return _change(connection, batch_id, changes)

    def take_lease(self, holder: str, seconds: int) -> bool:
        """Takes or extends the lease. Returns False if another holder has it."""
        table = batch_lease_table.c
        with self._database.transaction() as connection:
            now: int = connection.execute(select(unix_time(connection))).scalar_one()
            held = connection.execute(select(table.holder).where(table.until > now, table.holder != holder)).first()
            if held is None:
                connection.execute(delete(batch_lease_table))
                connection.execute(insert(batch_lease_table).values(holder=holder, until=now + seconds))
        return held is None

    def release_lease(self, holder: str) -> None:
        """Gives up the lease, so that another deployment can take it at once."""
        with self._database.transaction() as connection:
            connection.execute(delete(batch_lease_table).where(batch_lease_table.c.holder == holder))

    def begin_line(self, batch_id: str, number: int, holder: str) -> int:
        """Counts an attempt at a line. Returns the number of attempts so far.

        Raises:
            LeaseLost: `holder` does not have the lease, so it must not run the line.
        """
        line = (batch_lines_table.c.batch == batch_id) & (batch_lines_table.c.number == number)
        with self._database.transaction() as connection:
            _check_lease(connection, holder)
            more = update(batch_lines_table).where(line).values(attempts=batch_lines_table.c.attempts + 1)
            if connection.execute(more).rowcount == 0:
                connection.execute(insert(batch_lines_table).values(batch=batch_id, number=number, attempts=1))
            attempts: int = connection.execute(select(batch_lines_table.c.attempts).where(line)).scalar_one()
        return attempts

    def answer_lines(self, owner: str, batch_id: str, answers: Sequence[Answered]) -> int:
        """Stores the results of the first lines of `answers`, as one part. Returns their number, at least one.

        Does not change lines that have a result.

        Raises:
            FilesUnavailable: the part could not be written in time. No line has changed.
        """
        lines, size = [], 0
        for answer in answers:
            lines.append(f"{answer.number} {answer.result.text()}\n".encode())
            size += len(lines[-1])
            if size >= PART_BYTES:
                break
        part = self._write_part(owner, batch_id, b"".join(lines))
        with self._database.transaction() as connection:
            present = files_table.c.id == part, files_table.c.state == PART
            if connection.execute(select(files_table.c.id).where(*present)).first() is None:
                raise FilesUnavailable("the results of a batch were not written in time")
            for answer in answers[: len(lines)]:
                line = batch_lines_table.c.batch == batch_id, batch_lines_table.c.number == answer.number
                prompt, completion = answer.usage
                values = {"goes_to": answer.goes_to, "prompt_tokens": prompt, "completion_tokens": completion}
                unanswered = update(batch_lines_table).where(*line, batch_lines_table.c.goes_to.is_(None))
                connection.execute(unanswered.values(part=part, **values))
        return len(lines)

    def _write_part(self, owner: str, batch_id: str, content: bytes) -> str:
        """Writes a content that no line names yet, and returns its id. `purge` deletes it if none ever does."""
        now = int(time.time())
        part = _results(new_id("part-"), f"{batch_id}_part", content, now, now)
        with self._database.transaction() as connection:
            _insert_file(connection, owner, part, PART)
        self._contents.write(part.id, content)
        return part.id

    def answered(self, batch_id: str) -> set[int]:
        """Returns the numbers of the lines that have a result."""
        mine = batch_lines_table.c.batch == batch_id, batch_lines_table.c.goes_to.is_not(None)
        with self._database.transaction() as connection:
            return set(connection.execute(select(batch_lines_table.c.number).where(*mine)).scalars())

    def finish(
        self, open_batch: OpenBatch, ending: Ending, custom_ids: Mapping[int, str], retention_s: int, holder: str
    ) -> Batch:
        """Ends a batch and writes the results of its lines to files.

        Args:
            custom_ids: the custom ids of all lines, by number. The lines without a result become errors.

        Raises:
            LeaseLost: `holder` does not have the lease, so another deployment may run lines.
        """
        batch, now = open_batch.batch, int(time.time())
        expires = now + min(open_batch.output_expires_s or retention_s, retention_s)
        answered = self.answered(batch.id)
        missing = {number: custom_id for number, custom_id in custom_ids.items() if number not in answered}
        outcome = self._outcome(batch.id, ending, custom_ids, missing)
        contents = {kind: outcome.content(kind) for kind in (OUTPUT, ERRORS)}
        files = {
            kind: _results(new_id("file-"), f"{batch.id}_{kind}", content, now, expires)
            for kind, content in contents.items()
            if content
        }
        with self._database.transaction() as connection:
            _check_lease(connection, holder)
            for file in files.values():
                _insert_file(connection, open_batch.owner, file, WRITING)
        for kind, file in files.items():
            self._contents.write(file.id, contents[kind])
        with self._database.transaction() as connection:
            _check_lease(connection, holder)
            counted = _counted(connection, batch)
            counts = counted.request_counts
            if counts.completed + counts.failed + len(missing) != sum(map(_lines, contents.values())):
                raise LeaseLost  # another deployment answered lines meanwhile
            if not _confirm(connection, [file.id for file in files.values()]):
                raise FilesUnavailable("the files of a batch were not written in time")
            parts = _parts_of(connection, batch.id)
            connection.execute(update(files_table).where(files_table.c.id.in_(parts)).values(state=DELETING))
            connection.execute(delete(batch_lines_table).where(batch_lines_table.c.batch == batch.id))
            changed = counts.completed - outcome.lost, counts.failed + len(missing) + outcome.lost
            changes: dict[str, Any] = {
                "usage": counted.usage,
                "request_counts": counts.model_copy(update=dict(zip(("completed", "failed"), changed, strict=True))),
                **{_FIELDS[kind]: file.id for kind, file in files.items()},
            }
            done = _change(connection, batch.id, {**changes, "status": ending, f"{ending}_at": now})
        self._delete(parts)
        return done

    def _outcome(
        self, batch_id: str, ending: Ending, custom_ids: Mapping[int, str], missing: Mapping[int, str]
    ) -> _Outcome:
        """Returns the lines of the output file and of the error file, in the order of the input file.

        A result whose part is lost becomes an error with the tokens that were lost.
        """
        columns = batch_lines_table.c
        answered = columns.batch == batch_id, columns.goes_to.is_not(None)
        with self._database.transaction() as connection:
            rows = connection.execute(select(batch_lines_table).where(*answered)).all()
        results = {part: self._results(part) for part in {row.part for row in rows if row.part is not None}}
        lines = {OUTPUT: [], ERRORS: [(number, _not_run(ending, id_)) for number, id_ in missing.items()]}
        lost = 0
        for row in rows:
            # A row of an earlier version has its result in the database.
            text = row.result if row.part is None else results[row.part].get(row.number)
            if text is not None:
                lines[row.goes_to].append((row.number, text))
                continue
            custom_id = custom_ids.get(row.number, f"line {row.number}")
            lines[ERRORS].append((row.number, _lost(custom_id, (row.prompt_tokens, row.completion_tokens))))
            lost += row.goes_to == OUTPUT
        return _Outcome({kind: [text for _, text in sorted(pairs)] for kind, pairs in lines.items()}, lost)

    def _results(self, part: str) -> dict[int, str]:
        """Returns the results in a part by the numbers of their lines; empty if it is lost."""
        content = (self._contents.read(part) or b"").decode("ascii", "replace")
        lines = (line.partition(" ") for line in content.split("\n"))
        return {int(number): text for number, _, text in lines if number.isdecimal() and _is_json(text)}

    def purge(self, now: int, retention_s: int) -> None:
        """Deletes expired files that no open batch reads, and batches that ended before the retention time."""
        reading = select(batches_table.c.input_file_id).where(batches_table.c.status.in_(OPEN))
        ended = func.coalesce(batches_table.c.ended, batches_table.c.created / 1_000_000)
        with self._database.transaction() as connection:
            expired = files_table.c.expires <= now, files_table.c.id.not_in(reading), files_table.c.state != PART
            connection.execute(update(files_table).where(*expired).values(state=DELETING))
            old = batches_table.c.status.not_in(OPEN), ended < now - retention_s
            connection.execute(delete(batches_table).where(*old))
            named = select(batch_lines_table.c.part).where(batch_lines_table.c.part.is_not(None))
            unused = (files_table.c.state == PART) & files_table.c.id.not_in(named)
            unwritten = (files_table.c.state == WRITING) | unused, files_table.c.created < (now - WRITING_S) * 1_000_000
            connection.execute(update(files_table).where(*unwritten).values(state=DELETING))
            deleting = select(files_table.c.id).where(files_table.c.state == DELETING).limit(MAX_DELETED)
            ids = connection.execute(deleting).scalars().all()
        self._delete(ids)

    def sweep(self) -> None:
        """Deletes contents that have had no row for `ORPHAN_S`: the database lost rows, or a crash left a part.

        The time is for an operator who restored the wrong backup.
        """
        present = self._contents.ids()
        with self._database.transaction() as connection:
            known = set(connection.execute(select(files_table.c.id)).scalars())
        now = time.monotonic()
        self._orphans = {id_: self._orphans.get(id_, now) for id_ in present - known}
        for id_, seen in self._orphans.items():
            if now - seen >= ORPHAN_S:
                self._contents.delete(id_)

    def _delete(self, ids: Sequence[str]) -> None:
        """Deletes contents, then their rows."""
        for id_ in ids:
            self._contents.delete(id_)
        with self._database.transaction() as connection:
            connection.execute(delete(files_table).where(files_table.c.id.in_(ids), files_table.c.state == DELETING))

    def _move_one_out(self) -> bool:
        """Moves the content of one file out of the database. Returns False if there is none."""
        with self._database.transaction() as connection:
            columns = file_contents_table.c.id, file_contents_table.c.content
            row = connection.execute(select(*columns).limit(1)).first()
        if row is None:
            return False
        self._contents.write(row.id, row.content)
        with self._database.transaction() as connection:
            connection.execute(delete(file_contents_table).where(file_contents_table.c.id == row.id))
        return True


def _check_lease(connection: Connection, holder: str) -> None:
    table = batch_lease_table.c
    mine = select(table.holder).where(table.holder == holder, table.until > unix_time(connection))
    if connection.execute(mine).first() is None:
        raise LeaseLost


def _stored(connection: Connection, owner: str) -> int:
    total = select(func.coalesce(func.sum(files_table.c.bytes), 0)).where(files_table.c.owner == owner)
    return int(connection.execute(total).scalar_one())


def _results(id_: str, name: str, content: bytes, created_at: int, expires_at: int) -> File:
    return File(
        id=id_,
        bytes=len(content),
        created_at=created_at,
        expires_at=expires_at,
        filename=f"{name}.jsonl",
        purpose="batch_output",
    )


def _insert_file(connection: Connection, owner: str, file: File, state: str) -> None:
    """Stores the row of a file whose content is written next."""
    connection.execute(
        insert(files_table).values(
            id=file.id,
            owner=owner,
            created=time.time_ns() // 1000,
            expires=file.expires_at,
            bytes=file.bytes,
            record=file.model_dump_json(),
            state=state,
        )
    )


def _confirm(connection: Connection, ids: Sequence[str]) -> bool:
    """Shows files whose contents are written. Returns False if the time for that was over."""
    rows = update(files_table).where(files_table.c.id.in_(ids), files_table.c.state == WRITING)
    return connection.execute(rows.values(state=STORED)).rowcount == len(ids)


def _forget_ended(connection: Connection, owner: str, most: int) -> None:
    """Deletes the oldest ended batches of an owner, all but `most`."""
    ended = select(batches_table.c.id).where(batches_table.c.owner == owner, batches_table.c.status.not_in(OPEN))
    ids = connection.execute(ended.order_by(batches_table.c.created.desc()).offset(most)).scalars().all()
    connection.execute(delete(batches_table).where(batches_table.c.id.in_(ids)))


def _lines(content: bytes) -> int:
    return content.count(b"\n")


def _file(connection: Connection, owner: str, id_: str, param: str | None = None) -> File:
    mine = files_table.c.id == id_, files_table.c.owner == owner, files_table.c.state == STORED
    record = connection.execute(select(files_table.c.record).where(*mine)).scalar()
    if record is None:
        raise NotStored("this key has no such file", "file_not_found", param)
    return File.model_validate_json(record)


def _batch(connection: Connection, owner: str, id_: str) -> Batch:
    mine = batches_table.c.id == id_, batches_table.c.owner == owner
    record = connection.execute(select(batches_table.c.record).where(*mine)).scalar()
    if record is None:
        raise NotStored("this key has no such batch", "batch_not_found")
    return Batch.model_validate_json(record)


def _change(connection: Connection, batch_id: str, changes: Mapping[str, Any]) -> Batch:
    row = batches_table.c.id == batch_id
    before = Batch.model_validate_json(connection.execute(select(batches_table.c.record).where(row)).scalar_one())
    if before.status not in OPEN:
        return before
    after = before.model_copy(update=dict(changes))
    ended = None if after.status in OPEN else int(time.time())
    values = {"status": after.status, "record": after.model_dump_json(), "ended": ended}
    connection.execute(update(batches_table).where(row).values(values))
    return after


def _of_owner(connection: Connection, table: Table, owner: str, *, newest_first: bool) -> Sequence[str]:
    order = table.c.created.desc() if newest_first else table.c.created
    query = select(table.c.record).where(table.c.owner == owner).order_by(order)
    if table is files_table:
        query = query.where(files_table.c.state == STORED)
    return connection.execute(query).scalars().all()


def _page(records: list[Any], after: str | None, limit: int) -> Page:
    ids = [record.id for record in records]
    if after is not None and after not in ids:
        raise NotStored("after: there is no such object in this list", "invalid_value", "after")
    start = 0 if after is None else ids.index(after) + 1
    return Page(records[start : start + limit], len(records) > start + limit)


def _counted(connection: Connection, batch: Batch) -> Batch:
    """Returns an open batch with the counts of its lines so far. The record of an ended batch contains its counts."""
    if batch.status not in OPEN:
        return batch
    lines = batch_lines_table.c
    sums = func.coalesce(func.sum(lines.prompt_tokens), 0), func.coalesce(func.sum(lines.completion_tokens), 0)
    query = select(lines.goes_to, func.count(), *sums).where(lines.batch == batch.id, lines.goes_to.is_not(None))
    rows = {row[0]: row[1:] for row in connection.execute(query.group_by(lines.goes_to))}
    prompt, completion = (sum(int(row[place]) for row in rows.values()) for place in (1, 2))
    counts = RequestCounts(
        total=batch.request_counts.total,
        completed=rows.get(OUTPUT, (0,))[0],
        failed=rows.get(ERRORS, (0,))[0],
    )
    usage = BatchUsage(input_tokens=prompt, output_tokens=completion, total_tokens=prompt + completion)
    return batch.model_copy(update={"request_counts": counts, "usage": usage})


def _parts_of(connection: Connection, batch_id: str) -> Sequence[str]:
    lines = batch_lines_table.c
    named = select(lines.part).where(lines.batch == batch_id, lines.part.is_not(None)).distinct()
    return connection.execute(named).scalars().all()


def _not_run(ending: Ending, custom_id: str) -> str:
    message = {
        "expired": "the completion window ended before this request was answered",
        "cancelled": "the batch was cancelled before this request was answered",
    }.get(ending, "this request was not answered")
    error = LineError(code=f"batch_{ending}", message=message)
    return LineResult(id=new_id("batch_req_"), custom_id=custom_id, error=error).text()


def _is_json(text: str) -> bool:
    """Returns whether a text is JSON. A damaged result must not be delivered as one."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _lost(custom_id: str, usage: tuple[int, int]) -> str:
    """Returns the error of a line whose answer was charged and stored, and is lost."""
    prompt, completion = usage
    lost = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    failure = {"code": "answer_lost", "message": "the answer was stored and is lost", "type": "server_error"}
    body: dict[str, object] = {"error": {**failure, "param": None}, "usage": lost}
    response = LineResponse(status_code=500, request_id=new_id("req_"), body=body)
    return LineResult(id=new_id("batch_req_"), custom_id=custom_id, response=response).text()
