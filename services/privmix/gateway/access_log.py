"""Writes one log line for each request: key, route, status and duration, but no text or tokens."""

import logging
import re
import time
import traceback
from dataclasses import dataclass
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from privmix.gateway.answers import Answer
from privmix.gateway.errors import unexpected

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
_ACCEPTED_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

CLIENT_GONE = 499
"""The status in the log of a request whose client left before its response began."""


@dataclass
class AccessRecord:
    """Holds what the log shows of a request besides its route and duration. `key` is the id of the key."""

    request_id: str
    status: int = CLIENT_GONE
    key: str | None = None
    answer: Answer | None = None


def access_record(connection: HTTPConnection) -> AccessRecord:
    """Returns the record of a request, which its handler completes."""
    entry: AccessRecord = connection.scope["privmix.record"]
    return entry


class AccessLog:
    """Implements ASGI middleware for request ids, the access log, and error 500 in OpenAI's format.

    Ray Serve gives a request its id, and adds it to the response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server sends no body
        headers = Headers(scope=scope)
        entry = scope["privmix.record"] = AccessRecord(_request_id(headers))

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        started = time.monotonic()
        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            _log_unexpected(entry, error)
            if entry.status != CLIENT_GONE:
                raise
            await unexpected().response()(scope, receive, send_and_note)
        finally:
            _log(entry, scope, time.monotonic() - started)


def _request_id(headers: Headers) -> str:
    sent = headers.get(REQUEST_ID, "")
    return sent if _ACCEPTED_ID.fullmatch(sent) else uuid4().hex


def _log(entry: AccessRecord, scope: Scope, seconds: float) -> None:
    """Logs a request, with OpenTelemetry's names of attributes where they exist."""
    # The route is logged instead of the path, because the path of an unknown route could contain private text.
    attributes: dict[str, str | int | float | None] = {
        "http.request.method": scope["method"],
        "http.route": getattr(scope.get("route"), "path", "-"),
        "http.response.status_code": entry.status,
        "request_id": entry.request_id,
        "privmix.key": entry.key,
        "privmix.seconds": round(seconds, 3),
    }
    if entry.answer:
        attributes |= {**entry.answer.counts, "privmix.completion_tokens": entry.answer.tokens}
    logger.info("request", extra=attributes)


def _log_unexpected(entry: AccessRecord, error: Exception) -> None:
    # Only the type and the traceback are logged, because the message could quote a prompt.
    frames = reversed(traceback.extract_tb(error.__traceback__))
    places = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
    logger.error("failed with %s at %s", type(error).__qualname__, places, extra={"request_id": entry.request_id})
