"""Turns the deltas of a request's generations into a complete answer or server-sent events.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html, in OpenAI's format.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from privmix.gateway.answers import DONE, Answer, Json, error_event, event, to_json
from privmix.gateway.errors import ApiError
from privmix.gateway.response_queue import ResponseQueue

HEARTBEAT = b": waiting\n\n"

T = TypeVar("T")


async def kept_alive(chunks: AsyncGenerator[bytes, None], interval_s: float) -> AsyncGenerator[bytes, None]:
    """Yields `chunks`, and a comment whenever none arrives for `interval_s`, so that proxies do not close the stream.

    The first comment starts the response, so a refusal after it is an `error_event` instead of a status.

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


Submitted = AbstractAsyncContextManager[ResponseQueue]
"""What `CoordinatorClient.submit` or `admitted` returns."""


async def complete_answer(submitted: Submitted, answer: Answer) -> Json:
    """Waits until every choice has ended and returns the body of the response.

    Raises:
        ApiError: the submission was refused, or a generation failed.
    """
    try:
        async with submitted as queue:
            while not queue.drained:
                answer.add(await queue.take())
    except ApiError as failure:
        raise answer.failed(failure) from None
    return answer.complete()


async def stream_answer(
    submitted: Submitted,
    answer: Answer,
    write_interval_s: float,
    include_usage: bool,
    continuous_usage: bool = False,
) -> AsyncGenerator[bytes, None]:
    """Yields server-sent events while the answer grows, and combines the events of `write_interval_s` in one write.

    A failure after the first write becomes an error event; then the stream ends without [DONE].

    Raises:
        ApiError: as `complete_answer`, while nothing was written.
    """
    opening = list(answer.opening())
    started = ended = False
    try:
        async with submitted as queue:
            while not ended:
                deltas = await queue.take()
                answer.add(deltas)
                bodies = [*([] if started else opening), *answer.chunks(deltas, continuous_usage)]
                ended = queue.drained
                if ended and include_usage:
                    bodies.append(answer.closing())
                written = b"".join(event(to_json(body)) for body in bodies) + (DONE if ended else b"")
                if written:
                    started = True
                    yield written
                await queue.wait_for_more(write_interval_s)
    except ApiError as failure:
        if not started:
            raise answer.failed(failure) from None
        yield error_event(failure)
