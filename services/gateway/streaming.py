"""Turns the deltas of the coordinators into a complete answer or a stream of chunks."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain

from pydantic import BaseModel

from services.coordinator.messages import Generation
from services.gateway.answers import Answer
from services.gateway.coordinator_client import ResponseQueue
from services.gateway.errors import ApiError
from services.gateway.sse import DONE, error_event, events

Submit = Callable[[Sequence[Generation]], AbstractAsyncContextManager[ResponseQueue]]
"""`CoordinatorClient.submit`, or an `Admission`'s."""


async def complete_answer(submit: Submit, generations: Sequence[Generation], answer: Answer) -> BaseModel:
    """Waits until every choice has ended and returns the body of the response.

    Raises:
        ApiError: the submission was refused, or a generation failed.
    """
    try:
        async with submit(generations) as queue:
            while not queue.drained:
                answer.add(await queue.take())
    except ApiError as failure:
        raise answer.failed(failure) from None
    return answer.complete()


async def stream_answer(
    submit: Submit,
    generations: Sequence[Generation],
    answer: Answer,
    write_interval_s: float,
    include_usage: bool,
    continuous_usage: bool = False,
) -> AsyncGenerator[bytes, None]:
    """Yields server-sent events while the answer grows, and combines the events of `write_interval_s` in one write.

    A failure after the first write becomes an error event; then the stream ends without [DONE].

    Raises:
        ApiError: as `whole`, while nothing was written.
    """
    opening = list(answer.opening())
    started = ended = False
    try:
        async with submit(generations) as queue:
            while not ended:
                deltas = await queue.take()
                answer.add(deltas)
                written = events(chain([] if started else opening, answer.chunks(deltas, continuous_usage)))
                ended = queue.drained
                if ended:
                    written += events([answer.closing()] if include_usage else []) + DONE
                if written:
                    started = True
                    yield written
                await queue.wait_for_more(write_interval_s)
    except ApiError as failure:
        if not started:
            raise answer.failed(failure) from None
        yield error_event(failure)
