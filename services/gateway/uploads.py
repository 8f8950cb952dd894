"""Reads an uploaded file from a multipart body, in memory only: it may contain prompts, which only the database may
store."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from services.gateway.errors import ApiError, invalid

OVERHEAD_BYTES = 1 << 16
MOST_NAME_CHARACTERS = 255


@dataclass(frozen=True)
class Upload:
    """Holds an uploaded file. `fields` are the other fields of the form."""

    filename: str
    content: bytes
    fields: dict[str, str]


async def read_upload(request: Request, limit: int) -> Upload:
    """Reads one file of at most `limit` bytes.

    Raises:
        ApiError: 413, the file exceeds the limit; 415, the body is not multipart; 400, it has no file.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(415, "send the file as multipart/form-data", code="unsupported_media_type", param="file")
    too_large = ApiError(413, f"file: larger than {limit} bytes; split it", code="file_too_large", param="file")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit + OVERHEAD_BYTES:
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
    return Upload((file.filename or "file")[:MOST_NAME_CHARACTERS], content, fields)
