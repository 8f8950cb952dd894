"""Implements OpenAI's Files and Batch APIs: `/v1/files` and `/v1/batches`. A key cannot access another key's files.

An uploaded file is read in memory only: it may contain prompts, which only the batches actor may store.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, field_validator
from ray.exceptions import RayError, RayTaskError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.types import Receive, Scope, Send

from privmix.batches.actor import Batches
from privmix.batches.records import Batch, BatchRequest, File
from privmix.batches.settings import BatchSettings
from privmix.batches.store import Page
from privmix.foundation.actors import find_actor, remote
from privmix.foundation.errors import BatchesError, FilesUnavailable, KeysUnavailable, NotStored
from privmix.gateway.openapi import REFUSALS, body
from privmix.keys.rate_limiter import TokenBuckets
from privmix.requests.errors import ApiError, invalid, limited, unavailable
from privmix.requests.keys import ANSWER_S, KeyService
from privmix.requests.places import Places
from privmix.requests.preparation import Endpoint, in_time, read_body
from privmix.requests.schema import Body, refused
from privmix.requests.settings import RequestSettings
from privmix.requests.values import Id, declared_bytes, whole_number

OVERHEAD_BYTES = 1 << 16
MAX_NAME_CHARACTERS = 255

P = ParamSpec("P")
T = TypeVar("T")
BatchesMethod = Callable[Concatenate[Batches, P], Awaitable[T]]


@dataclass(frozen=True)
class Upload:
    """Holds an uploaded file. `fields` are the other fields of the form."""

    filename: str
    content: bytes
    fields: dict[str, str]


async def read_upload(request: Request, limit: int, identify: Callable[[], Awaitable[T]]) -> tuple[Upload, T]:
    """Reads one file of at most `limit` bytes, and identifies its client again, as `read_body` does.

    Raises:
        ApiError: 408, the file is too slow; 413, it exceeds the limit; 415, the body is not multipart; 400, it has no
            file, or its length is not a number.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(415, "send the file as multipart/form-data", code="unsupported_media_type", param="file")
    too_large = ApiError(413, f"file: larger than {limit} bytes; split it", code="file_too_large", param="file")
    if declared_bytes(request) > limit + OVERHEAD_BYTES:
        raise too_large

    async def limited() -> AsyncGenerator[bytes, None]:
        read = 0
        async for chunk in request.stream():
            read += len(chunk)
            if read > limit + OVERHEAD_BYTES:
                raise too_large
            yield chunk

    parser = MultiPartParser(request.headers, limited(), max_files=1, max_fields=8, max_part_size=OVERHEAD_BYTES)
    parser.spool_max_size = limit + OVERHEAD_BYTES + 1
    try:
        async with in_time(SENDING_S):
            form = await parser.parse()
    except (MultiPartException, KeyError, ValueError):
        raise ApiError(
            400, "the body is not multipart/form-data with one file", code="invalid_body", param="body"
        ) from None
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise invalid("file", "this field is required, as a file", "missing_required_parameter")
    content = await file.read()
    await form.close()
    if len(content) > limit:
        raise too_large
    fields = {name: value for name, value in form.items() if isinstance(value, str)}
    return Upload((file.filename or "file")[:MAX_NAME_CHARACTERS], content, fields), await identify()


MAX_BODY_BYTES = 1 << 16
SENDING_S = 600.0
"""The time in which a client sends a file."""
LEAST_EXPIRY_S, MAX_EXPIRY_S = 3600, 10**9
UPLOAD_S = 60.0
"""The time for an answer of the batches actor that reads or writes a content."""
MAX_TRANSFERS, MAX_TRANSFERS_OF_KEY = 16, 2
"""The uploads, and the downloads, of one gateway at the same time, in all and of one key: each is in memory."""
MAX_METADATA = 16
MAX_FILES = 10_000
MAX_BATCHES = 100
ANNOUNCEMENT_S = 5.0
_WINDOW = re.compile(r"([1-9]\d{0,4})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "JSON Lines, one request each."},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": LEAST_EXPIRY_S, "maximum": MAX_EXPIRY_S},
    },
}


class ExpiresAfter(Body):
    """When the output files of a batch are deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_EXPIRY_S, le=MAX_EXPIRY_S)


class NewBatch(Body):
    """The body of `POST /v1/batches`."""

    input_file_id: Id
    endpoint: Endpoint
    completion_window: str = Field(description="24h, or another number of minutes (m), hours (h) or days (d).")
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)
    output_expires_after: ExpiresAfter | None = None

    @field_validator("completion_window")
    @classmethod
    def _is_a_duration(cls, value: str) -> str:
        if not _WINDOW.fullmatch(value):
            raise refused("invalid_value", "give a number of minutes, hours or days, such as 24h")
        return value

    @field_validator("metadata", mode="before")
    @classmethod
    def _has_few_entries(cls, value: object) -> object:
        """Checks the number before the entries, each of which could be an error (`Items`)."""
        if isinstance(value, dict) and len(value) > MAX_METADATA:
            raise refused("invalid_value", f"give at most {MAX_METADATA} entries")
        return value

    @field_validator("metadata")
    @classmethod
    def _is_short(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        if any(len(key) > 64 or len(text) > 512 for key, text in (value or {}).items()):
            raise refused("invalid_value", "keys must have at most 64 characters, values at most 512")
        return value

    @property
    def request(self) -> BatchRequest:
        match = _WINDOW.fullmatch(self.completion_window)
        assert match is not None
        return BatchRequest(
            endpoint=self.endpoint,
            input_file_id=self.input_file_id,
            completion_window=self.completion_window,
            window_s=int(match[1]) * _SECONDS[match[2]],
            output_expires_s=None if self.output_expires_after is None else self.output_expires_after.seconds,
            metadata=self.metadata,
        )


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class _List(BaseModel):
    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(_List):
    data: list[File]


class BatchList(_List):
    data: list[Batch]


BODIES = (NewBatch,)


def _places(transfer: str) -> Places:
    message = f"a key may {transfer} {MAX_TRANSFERS_OF_KEY} files at the same time, and all together {MAX_TRANSFERS}"
    refusal = f"{message}; try again when one has ended", f"too_many_{transfer}s"
    return Places(MAX_TRANSFERS_OF_KEY, MAX_TRANSFERS, refusal)


class _Download(Response):
    """The content of a file. It is in memory, so its place is free only once it is sent or its client has left."""

    def __init__(self, content: bytes, place: ExitStack) -> None:
        super().__init__(content, media_type="application/jsonl", headers={"cache-control": "no-store"})
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            await super().__call__(scope, receive, send)


class BatchRoutes:
    """Implements the routes for files and batches, which the batches actor stores and runs."""

    def __init__(self, settings: RequestSettings, batches: BatchSettings, keys: KeyService) -> None:
        self._settings = settings
        self._max_file_bytes = batches.max_file_bytes
        self._changes = TokenBuckets(batches.changes_per_minute)
        self._uploads = _places("upload")
        self._downloads = _places("download")
        self._keys = keys

    async def announce(self) -> None:
        """Tells the batches actor again and again, because it may restart, that this gateway serves."""
        while self._settings.batches_actor is not None:
            with suppress(ApiError):
                await self._ask(Batches.serving)
            await asyncio.sleep(ANNOUNCEMENT_S)

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1", tags=["batches"], responses=REFUSALS)
        upload = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}}
        router.add_api_route("/files", self.upload, methods=["POST"], openapi_extra=upload)
        router.add_api_route("/files", self.files, methods=["GET"])
        router.add_api_route("/files/{file_id}", self.file, methods=["GET"])
        router.add_api_route("/files/{file_id}", self.delete_file, methods=["DELETE"])
        router.add_api_route("/files/{file_id}/content", self.content, methods=["GET"], response_class=Response)
        router.add_api_route("/batches", self.create, methods=["POST"], openapi_extra=body(NewBatch))
        router.add_api_route("/batches", self.batches, methods=["GET"])
        router.add_api_route("/batches/{batch_id}", self.batch, methods=["GET"])
        router.add_api_route("/batches/{batch_id}/cancel", self.cancel, methods=["POST"])
        return router

    async def upload(self, request: Request) -> File:
        """Store a file of requests. It is deleted on request or after the service's retention time."""
        owner = await self._owner(request)
        with self._uploads.taken(owner):
            self._count_change(owner)
            upload, owner = await read_upload(request, self._max_file_bytes, partial(self._owner, request))
            if upload.fields.get("purpose") != "batch":
                raise invalid("purpose", "only files for batches are accepted; use batch")
            described = upload.filename, upload.content, expiry(upload.fields)
            return await self._ask_for(UPLOAD_S, Batches.upload, owner, *described)

    def _count_change(self, owner: str) -> None:
        """Counts an upload, a deletion or a new batch, before its body is read.

        Raises:
            ApiError: 429, the key made too many of them at this gateway in a minute.
        """
        if (wait_s := self._changes.wait_s(owner)) > 0:
            message = f"a key may change its files and batches {self._changes.limit} times per minute; try again later"
            raise limited(message, "rate_limit_exceeded", wait_s)
        self._changes.take(owner)

    async def files(self, request: Request) -> FileList:
        """List the files of this key, newest first by default."""
        owner, query = await self._owner(request), request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order", "use asc or desc")
        limit = _limit(query.get("limit"), MAX_FILES, MAX_FILES)
        page = await self._ask(
            Batches.files, owner, query.get("purpose"), query.get("after"), limit, newest_first=order == "desc"
        )
        return FileList(data=list(page.records), **_ends(page))

    async def file(self, request: Request, file_id: str) -> File:
        """Return the description of a file."""
        return await self._ask(Batches.file, await self._owner(request), file_id)

    async def content(self, request: Request, file_id: str) -> Response:
        """Return the content of a file."""
        owner = await self._owner(request)
        with ExitStack() as place:
            place.enter_context(self._downloads.taken(owner))
            content = await self._ask_for(UPLOAD_S, Batches.content, owner, file_id)
            return _Download(content, place.pop_all())

    async def delete_file(self, request: Request, file_id: str) -> DeletedFile:
        """Delete a file and its content."""
        owner = await self._owner(request)
        self._count_change(owner)
        await self._ask(Batches.delete_file, owner, file_id)
        return DeletedFile(id=file_id)

    async def create(self, request: Request) -> Batch:
        """Run the requests of a file in the background. Interactive requests go first."""
        await self._owner(request)
        with self._keys.opened(request):
            sent, owner = await read_body(request, MAX_BODY_BYTES, partial(self._owner, request))
        new = NewBatch.parse(sent)
        self._count_change(owner)
        return await self._ask(Batches.create, owner, new.request)

    async def batches(self, request: Request) -> BatchList:
        """List the batches of this key, newest first."""
        owner, query = await self._owner(request), request.query_params
        page = await self._ask(Batches.batches, owner, query.get("after"), _limit(query.get("limit"), 20, MAX_BATCHES))
        return BatchList(data=list(page.records), **_ends(page))

    async def batch(self, request: Request, batch_id: str) -> Batch:
        """Return a batch."""
        return await self._ask(Batches.batch, await self._owner(request), batch_id)

    async def cancel(self, request: Request, batch_id: str) -> Batch:
        """End a batch after its running requests. Its output file contains the answers so far."""
        return await self._ask(Batches.cancel, await self._owner(request), batch_id)

    async def _owner(self, request: Request) -> str:
        return await self._keys.owner(request, "generate")

    async def _ask(self, method: BatchesMethod[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Calls a method of the batches actor that answers within `ANSWER_S` (`_ask_for`)."""
        return await self._ask_for(ANSWER_S, method, *arguments, **named)

    async def _ask_for(self, seconds: float, method: BatchesMethod[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Calls a method of the batches actor.

        Raises:
            ApiError: the actor refused the call, or 503 if it does not answer within `seconds`.
        """
        name = self._settings.batches_actor
        if name is None:
            raise ApiError(404, "batches are disabled in this service", code="batches_not_kept")
        try:
            async with asyncio.timeout(seconds):
                return await remote(method)(await find_actor(name, self._settings.namespace), *arguments, **named)
        except RayTaskError as error:
            raise _translate(error) from None
        except (RayError, ValueError, RuntimeError):
            raise unavailable(f"the actor {name!r} does not answer") from None
        except TimeoutError:
            raise unavailable(f"the actor {name!r} does not answer within {seconds:g} s") from None


def _translate(error: RayTaskError) -> Exception:
    """Returns the HTTP error for an error of the batches actor."""
    match error.cause:
        case NotStored() as missing:
            return ApiError(404, missing.message, code=missing.code, param=missing.param)
        case BatchesError() as refusal:
            status = {"file_in_use": 409, "too_many_batches": 429}.get(refusal.code, 400)
            return ApiError(status, refusal.message, code=refusal.code, param=refusal.param)
        case FilesUnavailable():
            return unavailable("the place of the files cannot be used now")
        case KeysUnavailable():
            return unavailable("the database of files and batches cannot be used now")
        case _:
            unexpected: Exception = error
            return unexpected


def expiry(fields: dict[str, str]) -> int | None:
    """Returns after how many seconds an uploaded file expires; None if its form does not say.

    Raises:
        ApiError: 400, the form says it wrongly.
    """
    seconds = fields.get("expires_after[seconds]")
    if seconds is None:
        return None
    if fields.get("expires_after[anchor]") != "created_at":
        raise invalid("expires_after", "give the anchor created_at")
    return whole_number(seconds, "expires_after", LEAST_EXPIRY_S, MAX_EXPIRY_S)


def _limit(text: str | None, default: int, most: int) -> int:
    return default if text is None else whole_number(text, "limit", 1, most)


def _ends(page: Page) -> dict[str, Any]:
    ids = [record.id for record in page.records]
    return {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None, "has_more": page.more}
