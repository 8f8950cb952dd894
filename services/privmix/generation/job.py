"""Generates a batch of private texts and survives a kill: it has one directory, one journal and one writer.

The append-only journal is authoritative. It has a record before each request, and one for each delivered piece; the
last piece has the reason why the text ended. `synthetic.jsonl` derives from it. A complete text is never requested
again; an incomplete text continues after its delivered part. So a kill costs at most the tokens that the service had
released but this process had not read: for each stream, those in transit until the service notices.

With a schema, every text is a JSON value, a record. An incomplete record is requested again from its beginning, because
the service follows a schema from the beginning of an answer only; the tokens of the incomplete one stay charged.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout

from privmix.foundation.errors import BudgetEndedError, GenerationError, InputError, StreamBrokenError
from privmix.foundation.files import sync_directory, write_atomically
from privmix.foundation.json_lines import load_lines, write_lines
from privmix.generation.client import RecordSchema, Sampling, ServiceClient, StreamedPiece
from privmix.generation.template import Item

JOB, JOURNAL, OUTPUT = "job.json", "journal.jsonl", "synthetic.jsonl"
_LOCK = ".generation.lock"
_FORMAT = 1
_ATTEMPTS = 5

ServiceStatement = Mapping[str, Any]


@dataclass(frozen=True)
class JobRequest:
    """Describes the texts of a job. It never changes for a directory."""

    template: str
    items: tuple[Item, ...]
    sampling: Sampling
    schema: RecordSchema | None = None

    @property
    def digest(self) -> str:
        """A hash that identifies the request. A directory accepts only one request."""
        described = [_FORMAT, self.template, [asdict(item) for item in self.items], asdict(self.sampling)]
        content = json.dumps(described if self.schema is None else [*described, self.schema])
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True)
class JobText:
    """Holds the current text of one item.

    Attributes:
        tokens: the number of released tokens, as far as this job knows.
        asked: the number of requests for it.
        answered_by: "public" or "mixed" if the public model answered all or some of it; see the gateway's `privmix`.
    """

    item: Item
    text: str = ""
    tokens: int = 0
    asked: int = 0
    finish_reason: str | None = None
    answered_by: str | None = None

    def record(self) -> dict[str, Any]:
        """Returns a line of the output."""
        answered = {"answered_by": self.answered_by} if self.answered_by else {}
        return {
            "id": self.item.index,
            **self.item.fields,
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            **answered,
        }


class GenerationJob:
    """Runs the job of a directory whose lock this process holds; see `opened`."""

    def __init__(self, directory: Path, request: JobRequest, described: dict[str, Any], journal: TextIO) -> None:
        self.directory = directory
        self.request = request
        self._described = described
        self._journal = journal
        self._output: TextIO | None = None
        self._budget_ended = False
        self.texts = [JobText(item) for item in request.items]
        self.tokens = 0
        """The number of delivered tokens, as far as this job knows."""
        self.done = 0
        """The number of complete texts."""

    @property
    def described(self) -> Mapping[str, Any]:
        """The content of `job.json`."""
        return self._described

    @property
    def open(self) -> list[JobText]:
        """The incomplete texts."""
        return [text for text in self.texts if text.finish_reason is None]

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens that the open texts can need."""
        restarts = self.request.schema is not None
        return sum(self.request.sampling.max_tokens - (0 if restarts else text.tokens) for text in self.open)

    async def run(
        self, service: ServiceClient, *, concurrency: int, partial: bool, progress: Callable[[float], None]
    ) -> ServiceStatement:
        """Generates every open text.

        Args:
            concurrency: the number of concurrent streams.
            partial: start even if the budget cannot pay for all texts, and end without an error when it is used up.
            progress: called with the fraction of complete texts.

        Returns:
            the service's statement after the last text.

        Raises:
            InputError: the job was refused before any token was spent.
            GenerationError: the job stopped. It keeps the delivered text.
        """
        before = await service.privacy()
        await self._check(service, before, partial)
        if "model" not in self._described:
            self._describe(model=service.model, privacy_before=before)
        elif self._described["model"] != service.model:
            raise InputError(
                f"model: {self.directory} has texts of {self._described['model']!r}, but this service serves "
                f"{service.model!r}; choose another --output"
            )
        waiting = iter(self.open)
        self._budget_ended = False
        progress(self.done / len(self.texts))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(self.open))):
                    group.create_task(self._work(waiting, service, progress))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        after = await service.privacy()
        self._describe(privacy_after=after, finished=_now())
        if self._budget_ended and not partial:
            raise BudgetEndedError(
                f"the budget is used up; {self.directory} keeps {self.done} of "
                f"{len(self.texts)} texts. --partial accepts that"
            )
        return after

    async def _check(self, service: ServiceClient, statement: ServiceStatement, partial: bool) -> None:
        left, needed = statement["tokens_left"], self.max_tokens
        if self.open and left is not None and left < (1 if partial else needed):
            raise InputError(
                f"budget: {len(self.open)} texts can take {needed:,} tokens, and {left:,} are left; request fewer "
                "texts or a lower --max-tokens" + ("" if left == 0 else ", or use --partial to generate fewer texts")
            )
        context = service.context_length
        if context is None:
            return
        for prompt in {text.item.prompt for text in self.open}:
            length = await service.prompt_tokens(prompt)
            if length + self.request.sampling.max_tokens > context:
                number = next(text.item.index for text in self.open if text.item.prompt == prompt)
                raise InputError(
                    f"prompts: item {number} has {length} tokens, which with --max-tokens "
                    f"{self.request.sampling.max_tokens} exceed the model's context of {context}"
                )

    async def _work(
        self, waiting: Iterator[JobText], service: ServiceClient, progress: Callable[[float], None]
    ) -> None:
        for text in waiting:
            if self._budget_ended:
                return
            try:
                await self._generate(text.item.index, service)
            except BudgetEndedError:
                self._budget_ended = True
            progress(self.done / len(self.texts))

    async def _generate(self, index: int, service: ServiceClient) -> None:
        """Generates the rest of a text. Continues after a broken stream, as after a kill."""
        for attempt in range(_ATTEMPTS):
            text = self.texts[index]
            if text.tokens >= self.request.sampling.max_tokens:
                break  # the last token was delivered, but not its finish_reason
            try:
                await self._request_rest(text, service)
                break
            except StreamBrokenError:
                if attempt + 1 == _ATTEMPTS:
                    raise
        if self.texts[index].finish_reason is None:
            self._note({"item": index, "finish_reason": "length"}, durable=True)
        self._append(self.texts[index])

    async def _request_rest(self, text: JobText, service: ServiceClient) -> None:
        if self.request.schema is not None and text.text:
            self._note({"item": text.item.index, "restarted": True}, durable=True)
            text = self.texts[text.item.index]
        index, before = text.item.index, text.tokens
        sampling = replace(self.request.sampling, max_tokens=self.request.sampling.max_tokens - before)
        self._note({"item": index, "asked": _now()}, durable=True)
        async for piece in service.stream(text.item.prompt + text.text, sampling, self.request.schema):
            self._note({"item": index, **_record(piece, before)}, durable=piece.finish_reason is not None)
            if piece.ended_by is not None:
                raise BudgetEndedError(f"an answer was ended by: {piece.ended_by}")
            if piece.finish_reason is not None:
                return
        raise StreamBrokenError("the service ended a stream without a finish_reason")

    def _append(self, text: JobText) -> None:
        if self._output is None:
            # Write the file again from the journal, which may contain more texts than were appended.
            complete = [other.record() for other in self.texts if other.finish_reason is not None and other is not text]
            write_lines(self.directory / OUTPUT, complete)
            self._output = (self.directory / OUTPUT).open("a", encoding="utf-8")
        self._output.write(json.dumps(text.record(), ensure_ascii=False) + "\n")
        _sync(self._output)

    def _note(self, record: Mapping[str, Any], *, durable: bool = False) -> None:
        self._journal.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._journal.flush()
        if durable:
            os.fsync(self._journal.fileno())
        self._apply(record)

    def _apply(self, record: Mapping[str, Any]) -> None:
        index = record["item"]
        text = self.texts[index]
        if record.get("restarted"):
            self.texts[index] = replace(text, text="", tokens=0, answered_by=None)
            return
        self.texts[index] = replace(
            text,
            text=text.text + record.get("text", ""),
            tokens=record.get("tokens", text.tokens),
            asked=text.asked + ("asked" in record),
            finish_reason=record.get("finish_reason", text.finish_reason),
            answered_by=_answered_by(text, record) if "text" in record else text.answered_by,
        )
        self.tokens += self.texts[index].tokens - text.tokens
        self.done += (self.texts[index].finish_reason is not None) - (text.finish_reason is not None)

    def replay(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Applies the journal of earlier processes."""
        for record in records:
            self._apply(record)

    def _describe(self, **changes: object) -> None:
        self._described |= changes
        write_atomically(self.directory / JOB, json.dumps(self._described, indent=2).encode() + b"\n")

    def close(self) -> None:
        """Writes the output from the journal."""
        if self._output is not None:
            self._output.close()
        write_lines(self.directory / OUTPUT, [text.record() for text in self.texts if text.finish_reason is not None])


@contextmanager
def opened(directory: Path, request: JobRequest) -> Iterator[GenerationJob]:
    """Opens a new or existing job and locks its directory.

    Raises:
        InputError: the directory belongs to another job.
        GenerationError: another process works on it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory / _LOCK, timeout=0):
            described = _described(directory, request)
            records = _read_journal(directory / JOURNAL)
            with (directory / JOURNAL).open("a", encoding="utf-8") as journal:
                job = GenerationJob(directory, request, described, journal)
                job.replay(records)
                try:
                    yield job
                finally:
                    job.close()
    except Timeout as error:
        raise GenerationError(f"output {directory}: another process generates there; wait or stop it") from error


def load_output(directory: Path) -> list[dict[str, Any]]:
    """Loads the complete texts of a job.

    Raises:
        InputError: the job has no output file.
    """
    try:
        return load_lines(directory / OUTPUT)
    except OSError as error:
        raise InputError(f"{directory}: has no {OUTPUT}; run `privmix generate --output {directory}`") from error


def load_job(directory: Path) -> dict[str, Any]:
    """Loads the `job.json` of a job.

    Raises:
        InputError: the file is missing or invalid.
    """
    try:
        described: dict[str, Any] = json.loads((directory / JOB).read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{directory}: is not a job of `privmix generate`") from error
    return described


def _described(directory: Path, request: JobRequest) -> dict[str, Any]:
    if (directory / JOB).exists():
        described = load_job(directory)
        if described.get("request") != request.digest:
            raise InputError(
                f"output {directory}: has a job with another template, prompts, schema or sampling; choose another "
                "directory, or repeat the options of that job to continue it"
            )
        return described
    if any(path.name != _LOCK for path in directory.iterdir()):
        raise InputError(
            f"output {directory}: is not empty and not a job of `privmix generate`; choose another directory"
        )
    described = {
        "format": _FORMAT,
        "request": request.digest,
        "begun": _now(),
        "template": request.template,
        "items": len(request.items),
        "sampling": asdict(request.sampling),
        **({} if request.schema is None else {"schema": request.schema}),
    }
    write_atomically(directory / JOB, json.dumps(described, indent=2).encode() + b"\n")
    (directory / JOURNAL).touch()
    sync_directory(directory)
    return described


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """Returns the records, after removing an incomplete last line of a killed process."""
    content = path.read_bytes() if path.exists() else b""
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        with path.open("rb+") as file:
            file.truncate(len(complete))
    try:
        return [json.loads(line) for line in complete.splitlines()]
    except ValueError as error:
        raise GenerationError(
            f"{path}: is damaged ({error}); its texts are charged, so the job does not start again by itself"
        ) from error


def _record(piece: StreamedPiece, before: int) -> dict[str, Any]:
    """Returns the journal's record of a piece, of a stream that began after `before` tokens of the text."""
    # A model can generate bytes that are no character.
    record: dict[str, Any] = {"text": piece.text.replace("\ufffd", ""), "tokens": before + piece.tokens}
    # The end of a budget leaves a structured text complete.
    if piece.finish_reason is not None and (piece.ended_by is None or piece.finish_reason == "stop"):
        record["finish_reason"] = piece.finish_reason
    if piece.answered_by is not None:
        record["answered_by"] = piece.answered_by
    return record


def _answered_by(text: JobText, record: Mapping[str, Any]) -> str | None:
    """Returns which model answered the text including a new piece: "mixed" if the pieces differ."""
    model = record.get("answered_by")
    if not text.text or model == text.answered_by:
        return model
    return "mixed"


def _sync(file: TextIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
