"""Writes server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) in OpenAI's format."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from services.gateway.errors import ApiError

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": waiting\n\n"

T = TypeVar("T")


def events(bodies: Iterable[BaseModel]) -> bytes:
    """Returns one event for each body, to send them in one write."""
    return b"".join(b"data: " + body.model_dump_json().encode() + b"\n\n" for body in bodies)


def error_event(failure: ApiError) -> bytes:
    """Returns the event that reports an error to OpenAI's clients during a stream."""
    return b"data: " + json.dumps(failure.body()).encode() + b"\n\n"


async def kept_alive(chunks: AsyncGenerator[bytes, None], interval_s: float) -> AsyncGenerator[bytes, None]:
    """Yields `chunks`, and a comment whenever none arrives for `interval_s`, so that proxies do not close the stream.

    The first comment starts the response, so a refusal after it is an event instead of a status.

    Raises:
        ApiError: raised by `chunks` before anything was written.
    """
    started = False
    pending: asyncio.Future[bytes] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(chunks))
            await asyncio.wait((pending,), timeout=interval_s)
            if pending.done():
                done, pending = pending, None
                chunk = done.result()
            else:
                chunk = HEARTBEAT
            started = True
            yield chunk
    except StopAsyncIteration:
        return
    except ApiError as failure:
        if not started:
            raise
        yield error_event(failure)
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await chunks.aclose()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. Cancels it when the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected first.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        # Cancelled work must release its resources before the request ends.
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    # If the proxy died, receive() raises, and the client is gone too.
    with suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass


class EventStream(StreamingResponse):
    """Sends `first` and then the items of `rest`. Always closes `rest`, also when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        # Keeps proxies from buffering events.
        unbuffered = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(_chain(first, rest), headers={**headers, **unbuffered})
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            # Some servers report a disconnect as an error of send.
            with suppress(ClientDisconnect, OSError):
                await unless_disconnected(receive, self.stream_response(send))


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for chunk in rest:
        yield chunk
