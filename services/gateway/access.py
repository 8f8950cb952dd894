"""One log line for each request: who, what route, how it ended, how long it took; no text and no tokens of it."""

import logging
import re
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from uuid import uuid4

from pydantic import SecretStr
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.answers import Answer
from services.gateway.errors import ApiError, unexpected

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
CLIENT_GONE = 499
_ACCEPTED_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass
class Record:
    """What is logged of a request besides its route and its time."""

    request_id: str
    status: int = CLIENT_GONE
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
        entry = scope["privmix.record"] = Record(_request_id(Headers(scope=scope)))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                if self._answer_id:
                    MutableHeaders(scope=message)[REQUEST_ID] = entry.request_id
            await send(message)

        started = time.monotonic()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            _log_unexpected(entry, error)
            if entry.status != CLIENT_GONE:
                raise
            await unexpected().response()(scope, receive, send_with_id)
        finally:
            _log(entry, scope, time.monotonic() - started)


def authorise(connection: HTTPConnection, keys: Sequence[SecretStr]) -> None:
    """Let a client in that shows one of the keys as a bearer token; everyone, if there are none.

    Raises:
        ApiError: 401.
    """
    scheme, _, shown = connection.headers.get("authorization", "").partition(" ")
    # Digests have one length, and all keys are looked at, so the time tells nothing of them.
    matches = [compare_digest(_digest(shown.strip()), _digest(key.get_secret_value())) for key in keys]
    if keys and not (scheme.lower() == "bearer" and any(matches)):
        raise ApiError(
            401,
            "give an API key of this service in the header: Authorization: Bearer KEY",
            code="invalid_api_key",
            kind="authentication_error",
            headers={"www-authenticate": "Bearer"},
        )


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _request_id(headers: Headers) -> str:
    given = headers.get(REQUEST_ID, "")
    return given if _ACCEPTED_ID.fullmatch(given) else uuid4().hex


def _log(entry: Record, scope: Scope, seconds: float) -> None:
    # The path of an unknown route could hold text.
    route = getattr(scope.get("route"), "path", "-")
    counts = entry.answer.counts if entry.answer else "-"
    logger.info(
        "request=%s method=%s route=%s status=%d seconds=%.3f %s",
        entry.request_id, scope["method"], route, entry.status, seconds, counts,
    )  # fmt: skip


def _log_unexpected(entry: Record, error: Exception) -> None:
    # An exception's message could quote a prompt, so only its type and place are logged.
    frames = reversed(traceback.extract_tb(error.__traceback__))
    places = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
    logger.error("request=%s failed with %s at %s", entry.request_id, type(error).__qualname__, places)
