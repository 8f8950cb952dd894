"""One log line and one span for each request: who, what route, how it ended, how long it took; no text, no tokens."""

import logging
import re
import time
import traceback
from dataclasses import dataclass
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services import tracing
from services.gateway.answers import Answer
from services.gateway.errors import unexpected

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
CLIENT_GONE = 499
_ACCEPTED_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass
class Record:
    """What is logged of a request besides its route and its time; `key` is the id of the key."""

    request_id: str
    status: int = CLIENT_GONE
    key: str | None = None
    answer: Answer | None = None


def record(connection: HTTPConnection) -> Record:
    """The record of the request at hand, for its handler to fill in."""
    found: Record = connection.scope["privmix.record"]
    return found


class AccessLog:
    """ASGI middleware: request ids, the log line, and a 500 in OpenAI's shape for what nobody expected.

    Ray Serve's proxy puts the request id on the response itself; `answer_id` is for servers that do not.
    """

    def __init__(self, app: ASGIApp, answer_id: bool) -> None:
        self._app = app
        self._answer_id = answer_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        entry = scope["privmix.record"] = Record(_request_id(headers))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                if self._answer_id:
                    MutableHeaders(scope=message)[REQUEST_ID] = entry.request_id
            await send(message)

        started = time.monotonic()
        with tracing.request("request", headers.get("traceparent")) as span:
            try:
                await self._app(scope, receive, send_with_id)
            except Exception as error:
                _log_unexpected(entry, error)
                if entry.status != CLIENT_GONE:
                    raise
                await unexpected().response()(scope, receive, send_with_id)
            finally:
                _log(entry, scope, time.monotonic() - started)
                tracing.say(span, _told(entry, scope))


def _request_id(headers: Headers) -> str:
    given = headers.get(REQUEST_ID, "")
    return given if _ACCEPTED_ID.fullmatch(given) else uuid4().hex


def _told(entry: Record, scope: Scope) -> dict[tracing.Attribute, str | int]:
    """What the log and the trace both say, under OpenTelemetry's names where it has one."""
    # The path of an unknown route could hold text.
    told: dict[tracing.Attribute, str | int] = {
        "http.request.method": scope["method"],
        "http.route": getattr(scope.get("route"), "path", "-"),
        "http.response.status_code": entry.status,
        "request_id": entry.request_id,
    }
    if entry.answer:
        told["privmix.completion_tokens"] = entry.answer.usage.completion_tokens
    return told


def _log(entry: Record, scope: Scope, seconds: float) -> None:
    counts = entry.answer.counts if entry.answer else {}
    told = {str(name): value for name, value in _told(entry, scope).items()}
    logger.info("request", extra={**told, **counts, "privmix.key": entry.key, "privmix.seconds": round(seconds, 3)})


def _log_unexpected(entry: Record, error: Exception) -> None:
    # An exception's message could quote a prompt, so only its type and place are logged.
    frames = reversed(traceback.extract_tb(error.__traceback__))
    places = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
    logger.error("failed with %s at %s", type(error).__qualname__, places, extra={"request_id": entry.request_id})
