"""Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html, as OpenAI's clients read them."""

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
    """One event for each body, to leave in one write."""
    return b"".join(b"data: " + body.model_dump_json().encode() + b"\n\n" for body in bodies)


def error_event(failure: ApiError) -> bytes:
    """How OpenAI's clients learn of a failure in the middle of a stream."""
    return b"data: " + json.dumps(failure.body()).encode() + b"\n\n"


async def kept_alive(chunks: AsyncGenerator[bytes, None], interval_s: float) -> AsyncGenerator[bytes, None]:
    """`chunks`, with a comment wherever none comes for `interval_s`, so that no proxy takes the stream for dead.

    The first comment begins the response, so a refusal after it is an event instead of a status.

    Raises:
        ApiError: as `chunks`, while nothing was written.
    """
    begun = False
    arriving: asyncio.Future[bytes] | None = None
    try:
        while True:
            arriving = arriving or asyncio.ensure_future(anext(chunks))
            await asyncio.wait((arriving,), timeout=interval_s)
            if arriving.done():
                arrived, arriving = arriving, None
                written = arrived.result()
            else:
                written = HEARTBEAT
            begun = True
            yield written
    except StopAsyncIteration:
        return
    except ApiError as failure:
        if not begun:
            raise
        yield error_event(failure)
    finally:
        if arriving is not None:
            arriving.cancel()
            await asyncio.gather(arriving, return_exceptions=True)
        await chunks.aclose()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away first.

    Raises:
        ClientDisconnect: the client went away.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        # Cancelled work must have let go of what it holds before the request is over.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    # A proxy that died cannot say that the client is gone.
    with suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass


class EventStream(StreamingResponse):
    """Sends `first`, then what `rest` yields; closes `rest` whatever happens, a client that goes away included."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        # Proxies in front must not hold events back.
        prompt = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(_chain(first, rest), headers={**headers, **prompt})
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            # A server may also say so when it is told to send.
            with suppress(ClientDisconnect, OSError):
                await unless_disconnected(receive, self.stream_response(send))


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for chunk in rest:
        yield chunk
