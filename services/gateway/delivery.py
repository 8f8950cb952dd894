"""From the hub to the client: a whole answer, or a stream of chunks."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain

from pydantic import BaseModel

from services.coordinator.messages import Generation
from services.gateway.answers import Answer
from services.gateway.errors import ApiError
from services.gateway.hub import Mailbox
from services.gateway.sse import DONE, error_event, events

Submit = Callable[[Sequence[Generation]], AbstractAsyncContextManager[Mailbox]]
"""`Hub.submit`, or an `Entrance`'s."""


async def whole(submit: Submit, generations: Sequence[Generation], answer: Answer) -> BaseModel:
    """Wait for every choice to end.

    Raises:
        ApiError: the submission was refused, or the answer failed on the way.
    """
    try:
        async with submit(generations) as mailbox:
            while not mailbox.drained:
                answer.hear(await mailbox.take())
    except ApiError as failure:
        raise answer.failed(failure) from None
    return answer.whole()


async def streamed(
    submit: Submit,
    generations: Sequence[Generation],
    answer: Answer,
    write_interval_s: float,
    include_usage: bool,
    continuous_usage: bool = False,
) -> AsyncGenerator[bytes, None]:
    """Server-sent events as the answer grows, those of `write_interval_s` in one write.

    A failure after the first write is an event of its own, after which the stream ends without [DONE].

    Raises:
        ApiError: as `whole`, while nothing was written.
    """
    opening = list(answer.opening())
    begun = ended = False
    try:
        async with submit(generations) as mailbox:
            while not ended:
                deltas = await mailbox.take()
                answer.hear(deltas)
                written = events(chain([] if begun else opening, answer.chunks(deltas, continuous_usage)))
                ended = mailbox.drained
                if ended:
                    written += events([answer.closing()] if include_usage else []) + DONE
                if written:
                    begun = True
                    yield written
                await mailbox.gather(write_interval_s)
    except ApiError as failure:
        if not begun:
            raise answer.failed(failure) from None
        yield error_event(failure)
