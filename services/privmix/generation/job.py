"""Generates a batch of private texts and survives a kill: it has one directory, one journal and one writer.

The append-only journal is authoritative. It begins with the job, and has a record before each request and one for each
delivered piece; the last piece has the reason why the text ended. `synthetic.jsonl` derives from it. A complete text is
never requested again; an incomplete text continues after its delivered part. So a kill costs at most the tokens that
the service had released but this process had not read: for each stream, those in transit until the service notices.

With a schema, every text is a JSON value, a record. An incomplete record is requested again from its beginning, because
the service follows a schema from the beginning of an answer only; the tokens of the incomplete one stay charged.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from privmix.foundation.errors import BudgetEndedError, GenerationError, InputError, StreamBrokenError
from privmix.foundation.files import only_writer
from privmix.foundation.json_lines import write_lines
from privmix.generation.client import Sampling, ServiceClient
from privmix.generation.template import Item

JOURNAL, OUTPUT = "journal.jsonl", "synthetic.jsonl"
_ATTEMPTS = 5
"""How often a text whose stream breaks is requested."""


@dataclass(frozen=True)
class JobRequest:
    """Describes the texts of a job. A directory accepts only one request."""

    template: str
    items: tuple[Item, ...]
    sampling: Sampling
    schema: Mapping[str, Any] | None = None

    @property
    def digest(self) -> str:
        """A hash that identifies the request."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


@dataclass
class JobText:
    """Holds the current text of one item.

    Attributes:
        tokens: the number of released tokens, as far as this job knows.
        asked: the number of requests for it.
        answered_by: the model that answered all or some of it without the parts (`privmix.gateway.answers`).
    """

    item: Item
    text: str = ""
    tokens: int = 0
    asked: int = 0
    finish_reason: str | None = None
    answered_by: str | None = None

    def record(self) -> dict[str, Any]:
        """Returns a line of the output."""
        line = {"id": self.item.index, **self.item.fields, "text": self.text, "tokens": self.tokens}
        answered = {"answered_by": self.answered_by} if self.answered_by else {}
        return {**line, "finish_reason": self.finish_reason, **answered}


class GenerationJob:
    """Runs the job of a directory whose lock this process holds; see `opened`.

    Attributes:
        described: what the journal says of the job: `request`, `begun`, and once it runs, `model` and `privacy`, the
            service's statement before the first text.
        tokens: the number of delivered tokens, as far as this job knows, with those of records that were begun again.
        whole: the number of complete texts.
    """

    def __init__(self, directory: Path, request: JobRequest, journal: TextIO) -> None:
        self.directory = directory
        self.request = request
        self.described: dict[str, Any] = {}
        self.texts = [JobText(item) for item in request.items]
        self.tokens = self.whole = 0
        self._journal = journal
        self._budget_ended = False

    @property
    def open(self) -> list[JobText]:
        """The incomplete texts."""
        return [text for text in self.texts if text.finish_reason is None]

    @property
    def done(self) -> float:
        """The fraction of complete texts."""
        return self.whole / len(self.texts)

    async def run(
        self, service: ServiceClient, *, concurrency: int, partial: bool, progress: Callable[[float], None]
    ) -> None:
        """Generates every open text.

        Args:
            concurrency: the number of concurrent streams.
            partial: start even if the budget cannot pay for all texts, and end without an error when it is used up.
            progress: called with the fraction of complete texts.

        Raises:
            InputError: the job was refused before any token was spent.
            GenerationError: the job stopped. It keeps the delivered text.
        """
        statement = await service.privacy()
        if self.open:
            await self._check(service, statement["tokens_left"], partial)
        if "model" not in self.described:
            self.note({"model": service.model, "privacy": statement}, durable=True)
        elif self.described["model"] != service.model:
            raise InputError(
                f"model: {self.directory} has texts of {self.described['model']!r}, but this service serves "
                f"{service.model!r}; choose another --output"
            )
        waiting = iter(self.open)
        self._budget_ended = False
        progress(self.done)

        async def work() -> None:
            for text in waiting:
                if self._budget_ended:
                    return
                try:
                    await self._generate(text, service)
                except BudgetEndedError:
                    self._budget_ended = True
                progress(self.done)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(self.open))):
                    group.create_task(work())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if self._budget_ended and not partial:
            raise BudgetEndedError(
                f"the budget is used up; {self.directory} keeps {self.whole} of {len(self.texts)} texts. "
                "--partial accepts that"
            )

    async def _check(self, service: ServiceClient, left: int | None, partial: bool) -> None:
        most = self.request.sampling.max_tokens
        needed = sum(most - (0 if self.request.schema is not None else text.tokens) for text in self.open)
        if left is not None and left < (1 if partial else needed):
            raise InputError(
                f"budget: {len(self.open)} texts can take {needed:,} tokens, and {left:,} are left; request fewer "
                "texts or a lower --max-tokens" + ("" if left == 0 else ", or use --partial to generate fewer texts")
            )
        longest = max((text.item for text in self.open), key=lambda item: len(item.prompt))
        length = await service.prompt_tokens(longest.prompt)
        if service.context_length is not None and length + most > service.context_length:
            raise InputError(
                f"prompts: item {longest.index} has {length} tokens, and with --max-tokens {most} exceeds the model's "
                f"context of {service.context_length}; shorten it, or lower --max-tokens"
            )

    async def _generate(self, text: JobText, service: ServiceClient) -> None:
        """Generates the rest of a text. Continues after a broken stream, as after a kill."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                await self._request_rest(text, service)
                return
            except StreamBrokenError:
                if attempt == _ATTEMPTS:
                    raise

    async def _request_rest(self, text: JobText, service: ServiceClient) -> None:
        index, sampling = text.item.index, self.request.sampling
        if text.tokens >= sampling.max_tokens:  # the last token was delivered, but not its finish_reason
            self.note({"item": index, "finish_reason": "length"}, durable=True)
            return
        if self.request.schema is not None and text.text:
            self.note({"item": index, "restarted": True})
        before, rest = text.tokens, sampling.max_tokens - text.tokens
        self.note({"item": index, "asked": _now()}, durable=True)
        async for piece in service.stream(text.item.prompt + text.text, sampling, rest, self.request.schema):
            ended_by, reason = piece.pop("ended_by", None), piece.get("finish_reason")
            if ended_by is not None and reason != "stop":  # the end of a budget leaves a structured text complete
                piece.pop("finish_reason", None)
            self.note({"item": index, **piece, "tokens": before + piece["tokens"]}, durable=reason is not None)
            if ended_by is not None:
                raise BudgetEndedError(f"an answer was ended by: {ended_by}")
            if reason is not None:
                return
        raise StreamBrokenError("the service ended a stream without a finish_reason; run again to continue")

    def note(self, record: Mapping[str, Any], *, durable: bool = False) -> None:
        """Appends a record to the journal and applies it."""
        self._journal.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._journal.flush()
        if durable:
            os.fsync(self._journal.fileno())
        self.apply(record)

    def apply(self, record: Mapping[str, Any]) -> None:
        """Applies a record of the journal."""
        if "item" not in record:
            self.described |= record
            return
        text = self.texts[record["item"]]
        if "restarted" in record:
            text.text, text.tokens, text.answered_by = "", 0, None
        if "text" in record:
            model = record.get("answered_by")
            text.answered_by = model if not text.text or model == text.answered_by else "mixed"
            self.tokens += record["tokens"] - text.tokens
            text.text, text.tokens = text.text + record["text"], record["tokens"]
        text.asked += "asked" in record
        if "finish_reason" in record:
            text.finish_reason = record["finish_reason"]
            self.whole += 1


@contextmanager
def opened(directory: Path, request: JobRequest) -> Iterator[GenerationJob]:
    """Opens a new or existing job, locks its journal, and writes the output at the end of the block.

    Raises:
        InputError: the directory belongs to another job.
        WorkError: another process works on it, or its journal is damaged.
    """
    journal = directory / JOURNAL
    if not journal.exists() and any(directory.glob("[!.]*")):
        raise InputError(
            f"output {directory}: is not empty and not a job of `privmix generate`; choose another directory"
        )
    with only_writer(directory, "generation"), journal.open("a", encoding="utf-8") as file:
        job = GenerationJob(directory, request, file)
        records = _read_journal(journal)
        if records and records[0].get("request") != request.digest:
            raise InputError(
                f"output {directory}: has a job with another template, prompts, schema or sampling; choose another "
                "directory, or repeat the options of that job to continue it"
            )
        for record in records:
            job.apply(record)
        if not records:
            job.note({"request": request.digest, "begun": _now()}, durable=True)
        try:
            yield job
        finally:
            write_lines(directory / OUTPUT, [text.record() for text in job.texts if text.finish_reason is not None])


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """Returns the records, after removing an incomplete last line of a killed process."""
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        os.truncate(path, len(complete))
    try:
        return [json.loads(line) for line in complete.splitlines()]
    except ValueError as error:
        raise GenerationError(
            f"{path}: is damaged ({error}); its texts are charged, so the job does not start again by itself"
        ) from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
