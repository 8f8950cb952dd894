"""Claim: over real Ray, requests share one stream per coordinator, here one that repeats each prompt token by token."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import ray
from ray.actor import ActorHandle

from privmix.coordinator.messages import Delta, Generation
from privmix.foundation.errors import CoordinatorUnavailable, Overloaded
from privmix.gateway.answers import Answer, CompletionStyle
from privmix.gateway.coordinator_client import CoordinatorClient
from privmix.gateway.counters import Counters
from privmix.gateway.errors import NO_RETRY, ApiError
from privmix.gateway.response_queue import ResponseQueue
from privmix.gateway.streaming import complete_answer, stream_answer
from privmix.privacy.mollifiers.shaping import SamplingOptions
from tests.support.ray_cluster import ray_cluster
from tests.support.waiting import becoming

pytestmark = pytest.mark.anyio

PAIR = ("coordinator", "coordinator-1")
OVERLOADED, UNAVAILABLE = -1, -2
REFUSALS = {OVERLOADED: Overloaded(7.0), UNAVAILABLE: CoordinatorUnavailable("shard 3 does not answer")}
FOR_EVER, ERROR, SILENCE, AWAY, DEADLY, DEADLY_AT_ONCE = range(10_000, 10_006)
"""Prompt tokens with a meaning: repeat for ever; the generation fails; generate nothing; a shard is away; kill the
coordinator's process; kill it before it has accepted the generation."""
BUSY_S = 0.2
"""How long a cancellation takes, because the real coordinator may be in the middle of a step."""
RESTART_S = 180.0
"""How long a test waits for a killed coordinator, whose process imports its libraries again, on a busy machine."""


def _own(id_: str) -> str:
    """Returns the generation's id. Each submission adds a suffix to it."""
    return id_.partition("-")[0]


@ray.remote(num_cpus=0, max_concurrency=100)
class Repeater:
    """Accepts at most `capacity` generations and repeats their prompts."""

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._queues: dict[str, asyncio.Queue[list[Delta]]] = {}
        self._answering: dict[str, asyncio.Task[None]] = {}
        self._cancelled: list[str] = []

    def _queue(self, channel: str) -> asyncio.Queue[list[Delta]]:
        return self._queues.setdefault(channel, asyncio.Queue())

    async def submit(self, channel: str, generations: Sequence[Generation]) -> None:
        refusal = REFUSALS.get(generations[0].prompt[0])
        if refusal:
            raise refusal
        if len(self._answering) + len(generations) > self._capacity:
            raise Overloaded(3.0)
        for generation in generations:
            if DEADLY_AT_ONCE in generation.prompt:
                os.kill(os.getpid(), signal.SIGKILL)
            self._answering[generation.id] = asyncio.create_task(self._answer(self._queue(channel), generation))

    async def _answer(self, queue: asyncio.Queue[list[Delta]], generation: Generation) -> None:
        try:
            await self._repeat(queue, generation)
        finally:
            self._answering.pop(generation.id, None)

    async def _repeat(self, queue: asyncio.Queue[list[Delta]], generation: Generation) -> None:
        for token in generation.prompt:
            if token == DEADLY:
                os.kill(os.getpid(), signal.SIGKILL)
            if token in (ERROR, AWAY):
                await queue.put([Delta(generation.id, "", (), "error", retry_after=30.0 if token == AWAY else None)])
                return
            if token == SILENCE:
                await asyncio.sleep(3600)
            while token == FOR_EVER:
                await queue.put([Delta(generation.id, "again ", (token,))])
                await asyncio.sleep(0.01)
            await queue.put([Delta(generation.id, f"{token} ", (token,))])
            await asyncio.sleep(0)
        await queue.put([Delta(generation.id, "", (), "length")])

    async def cancel(self, ids: Sequence[str]) -> None:
        await asyncio.sleep(BUSY_S)
        for id_ in ids:
            self._cancelled.append(_own(id_))
            if answering := self._answering.pop(id_, None):
                answering.cancel()

    async def cancelled(self) -> list[str]:
        return self._cancelled

    async def answering(self) -> list[str]:
        return list(map(_own, self._answering))

    async def load(self) -> int:
        return len(self._answering)

    async def pid(self) -> int:
        return os.getpid()

    async def channels(self) -> int:
        return len(self._queues)

    async def events(self, channel: str) -> AsyncIterator[list[Delta]]:
        queue = self._queue(channel)
        try:
            while True:
                batch = await queue.get()
                while not queue.empty():
                    batch += queue.get_nowait()
                yield batch
        finally:
            del self._queues[channel]

    async def health(self) -> None: ...


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Starts Ray unless it runs, and yields a new namespace."""
    with nullcontext() if ray.is_initialized() else ray_cluster(2):
        yield uuid4().hex


@pytest.fixture(scope="module")
def coordinator(cluster: str) -> Iterator[ActorHandle]:
    actor = start(cluster)
    yield actor
    ray.kill(actor)


@pytest.fixture
def own(cluster: str) -> Iterator[str]:
    """A namespace, whose coordinators end with the test."""
    namespace = uuid4().hex
    yield namespace
    for name in PAIR:
        with suppress(ValueError):  # there is none
            ray.kill(ray.get_actor(name, namespace))


def start(namespace: str, name: str = "coordinator", capacity: int = 10_000, restarts: int = 0) -> ActorHandle:
    """Starts a coordinator. Retries, because a killed actor may hold its name for a moment."""
    # Detached, it goes on without a handle.
    options = {"name": name, "namespace": namespace, "max_restarts": restarts, "lifetime": "detached"}
    for _ in range(100):
        try:
            actor = Repeater.options(**options).remote(capacity)  # type: ignore[attr-defined]
        except ValueError:
            time.sleep(0.1)
            continue
        ray.get(actor.health.remote())
        return actor
    raise TimeoutError("the killed coordinator still holds its name")


@asynccontextmanager
async def connected(
    namespace: str,
    stall_timeout_s: float = 30.0,
    recovery_s: float = 0.0,
    coordinators: Sequence[str] = ("coordinator",),
) -> AsyncIterator[CoordinatorClient]:
    client = CoordinatorClient(namespace, coordinators, stall_timeout_s, recovery_s)
    async with client.running():
        await becoming(lambda: client.connected == len(coordinators))
        yield client


async def until(call: Any, condition: Callable[[Any], bool]) -> None:
    """Calls the actor until the result meets the condition."""
    async with asyncio.timeout(30):
        while not condition(await call.remote()):
            await asyncio.sleep(0.05)


def has_size(count: int) -> Callable[[Sequence[str]], bool]:
    return lambda names: len(names) == count


def new_generations(*prompts: Sequence[int]) -> list[Generation]:
    return [Generation(uuid4().hex, tuple(prompt), SamplingOptions(), 100) for prompt in prompts]


def new_answer(generations: Sequence[Generation]) -> Answer:
    return Answer(CompletionStyle(), "privmix", generations, 9)


async def ask(client: CoordinatorClient, *prompts: Sequence[int]) -> dict[str, Any]:
    generations = new_generations(*prompts)
    return await complete_answer(client.submit(generations), new_answer(generations))


async def refused(client: CoordinatorClient, *prompts: Sequence[int]) -> ApiError:
    with pytest.raises(ApiError) as refusal:
        await ask(client, *prompts)
    return refusal.value


async def chunks(client: CoordinatorClient, *prompts: Sequence[int], usage: bool = False) -> list[list[Any]]:
    """Returns the events of a stream as one list for each write."""
    generations = new_generations(*prompts)
    writes = [write async for write in stream_answer(client.submit(generations), new_answer(generations), 0.05, usage)]
    return [[_body(event) for event in write.decode().split("\n\n") if event] for write in writes]


def _body(event: str) -> Any:
    data = event.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


async def test_every_request_gets_its_own_deltas(coordinator: ActorHandle, cluster: str) -> None:
    async with connected(cluster) as client:
        prompts = [list(range(first, first + 20)) for first in range(0, 1000, 20)]
        answers = await asyncio.gather(*(ask(client, prompt, prompt[::-1]) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            texts = [choice["text"] for choice in answer["choices"]]
            assert texts == ["".join(f"{token} " for token in tokens) for tokens in (prompt, prompt[::-1])]
            assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 40, "total_tokens": 49}
        await until(coordinator.channels, lambda channels: channels == 1)


async def test_a_stream_contains_the_complete_answer_in_few_writes(coordinator: ActorHandle, cluster: str) -> None:
    async with connected(cluster) as client:
        writes = await chunks(client, range(1, 101), range(101, 201), usage=True)
    events = [event for write in writes for event in write]
    assert events.pop() == "[DONE]"
    closing = events.pop()
    assert (closing["choices"], closing["usage"]["completion_tokens"]) == ([], 200)
    for index, first in enumerate((1, 101)):
        pieces = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert "".join(piece["text"] for piece in pieces) == "".join(f"{token} " for token in range(first, first + 100))
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len(writes) < 100


@pytest.mark.parametrize(
    ("first", "status", "code", "headers"),
    [
        (OVERLOADED, 429, "overloaded", {"retry-after": "7"}),
        (UNAVAILABLE, 503, "service_unavailable", {"retry-after": "5"}),
    ],
)
async def test_a_refused_submission_is_an_error_and_cancels_nothing(
    coordinator: ActorHandle, cluster: str, first: int, status: int, code: str, headers: dict[str, str]
) -> None:
    before = await coordinator.cancelled.remote()
    async with connected(cluster) as client:
        refusal = await refused(client, [first])
        assert (refusal.status, refusal.code, refusal.headers) == (status, code, headers)
        with pytest.raises(ApiError) as streaming:
            await chunks(client, [first])
        assert (streaming.value.status, streaming.value.code) == (status, code)
        await asyncio.sleep(0.2)
        assert await coordinator.cancelled.remote() == before


async def test_a_failed_answer_says_whether_a_retry_helps(coordinator: ActorHandle, cluster: str) -> None:
    async with connected(cluster) as client:
        failure = await refused(client, [1, ERROR])
        assert (failure.status, failure.code, failure.headers) == (
            503,
            "generation_failed",
            {"x-should-retry": "false"},
        )
        assert (await refused(client, [ERROR])).headers == {"x-should-retry": "false"}
        assert (await refused(client, [AWAY])).headers == {"retry-after": "30"}, "the time until a shard is replaced"
        assert (await refused(client, [1, AWAY])).headers["x-should-retry"] == "false", "its first token was charged"


async def test_a_request_that_is_abandoned_during_its_submission_is_cancelled(
    coordinator: ActorHandle, cluster: str
) -> None:
    async with connected(cluster) as client:
        generations = new_generations([FOR_EVER])
        waiting = asyncio.create_task(complete_answer(client.submit(generations), new_answer(generations)))
        await asyncio.sleep(0)
        waiting.cancel()
        await until(coordinator.cancelled, lambda cancelled: generations[0].id in cancelled)


async def test_a_cancellation_that_coincides_with_a_delta_is_not_lost() -> None:
    (generation,) = new_generations([FOR_EVER])
    queue = ResponseQueue([generation], 60.0, Counters())
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0.05)
    queue.put(Delta(generation.id, "a", (1,)))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_generation_that_ends_before_its_acceptance_is_lost_is_not_submitted_again() -> None:
    client, submitted = CoordinatorClient("none", PAIR, 30.0, 0.0), list[str]()

    def submit(generations: Sequence[Generation]) -> SimpleNamespace:
        async def accepted() -> None:
            if len(submitted) == 2:
                client._deliver([Delta(generations[0].id, "", (), "length")])
                client._reassign(client._channels[0])
                raise ConnectionError

        submitted.extend(_own(generation.id) for generation in generations)
        return SimpleNamespace(accepted=accepted, cancel=lambda _: asyncio.sleep(0))

    for channel in client._channels:
        channel._coordinator = channel.submit = submit  # type: ignore[assignment, method-assign]
    generations = [replace(generation, id=id_) for generation, id_ in zip(new_generations([1], [1]), "ab", strict=True)]
    async with client.submit(generations) as queue:
        assert submitted == ["a", "b", "b"]
        assert (list(queue.open), [delta.id for delta in await queue.take()]) == (["b"], ["a"])


async def test_a_silent_coordinator_fails_the_request(coordinator: ActorHandle, cluster: str) -> None:
    async with connected(cluster, stall_timeout_s=1.0) as client:
        failure = await refused(client, [SILENCE])
        assert (failure.status, failure.code) == (503, "stalled")


@pytest.mark.slow
async def test_the_permanent_loss_of_a_coordinator_fails_its_requests(own: str) -> None:
    doomed = start(own)
    async with connected(own) as client:
        waiting = [asyncio.create_task(ask(client, [FOR_EVER])) for _ in range(8)]
        generations = new_generations([FOR_EVER])
        stream = stream_answer(client.submit(generations), new_answer(generations), 0.0, False)
        await anext(stream)
        await asyncio.sleep(0.5)
        ray.kill(doomed)

        for failure in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(failure, ApiError)
            assert (failure.status, failure.code) == (503, "coordinator_lost")
            assert failure.headers["x-should-retry"] == "false"
        *_, last = [write async for write in stream]
        assert _body(last.decode().strip())["error"]["code"] == "coordinator_lost"
        assert (await refused(client, [1])).code == "service_unavailable"

        start(own)
        await becoming(lambda: client.connected)
        assert (await ask(client, [1]))["choices"][0]["text"] == "1 "


@asynccontextmanager
async def endless(client: CoordinatorClient, requests: int) -> AsyncIterator[None]:
    """Asks for this many endless answers, and leaves at the end of the block."""
    waiting = [asyncio.create_task(ask(client, [FOR_EVER])) for _ in range(requests)]
    yield
    for request in waiting:
        request.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.slow
async def test_a_request_goes_to_the_coordinator_with_the_least_load(own: str) -> None:
    actors = [start(own, name) for name in PAIR]
    async with connected(own, coordinators=PAIR) as client:
        async with endless(client, 6):
            for actor in actors:
                await until(actor.answering, has_size(3))
            os.kill(await actors[0].pid.remote(), signal.SIGKILL)
            await until(actors[1].answering, has_size(6))
        assert (await ask(client, [1]))["choices"][0]["text"] == "1 ", "a lost coordinator gets no requests"


@pytest.mark.slow
async def test_a_request_goes_to_another_coordinator_if_one_is_full(own: str) -> None:
    actors = [start(own, name, capacity) for name, capacity in zip(PAIR, (1, 3), strict=True)]
    async with connected(own, recovery_s=30.0, coordinators=PAIR) as client, endless(client, 4):
        for actor, capacity in zip(actors, (1, 3), strict=True):
            await until(actor.answering, has_size(capacity))
        failure = await refused(client, [1])
        assert (failure.status, failure.code) == (429, "overloaded"), "refused at once if all are full"


@pytest.mark.slow
@pytest.mark.parametrize("deadly", [DEADLY, DEADLY_AT_ONCE])
async def test_a_request_that_kills_every_coordinator_fails(own: str, deadly: int) -> None:
    """Also one that kills it before it was accepted. A client that repeated it would kill them for ever."""
    start(own, restarts=-1)
    async with connected(own, stall_timeout_s=RESTART_S, recovery_s=RESTART_S) as client:
        failure = await refused(client, [1, deadly])
        assert (failure.status, failure.code, failure.headers) == (503, "coordinator_lost", NO_RETRY)
        await asyncio.sleep(1)
        assert (await ask(client, [1]))["choices"][0]["text"] == "1 "


@pytest.mark.slow
async def test_a_request_that_ends_without_a_coordinator_is_not_submitted_again(own: str) -> None:
    doomed = start(own)
    used: list[int | None] = []

    async def ended(tokens: int | None) -> None:
        used.append(tokens)

    async with connected(own, recovery_s=30.0) as client:
        async with client.submit(new_generations([FOR_EVER]), on_end=ended) as queue:
            await queue.take()
            ray.kill(doomed)
            await becoming(lambda: not client.connected)
        successor = start(own)
        await becoming(lambda: client.connected)
        await asyncio.sleep(0.5)
        assert used == [None], "the last releases of the lost coordinator are unknown"
        assert await successor.answering.remote() == []


async def test_a_gateway_that_stops_closes_its_channel(coordinator: ActorHandle, cluster: str) -> None:
    async with connected(cluster) as client:
        await ask(client, [1])
    await until(coordinator.channels, lambda channels: channels == 0)


@ray.remote(num_cpus=0, max_concurrency=2)
class Gateway:
    """Runs a gateway in a separate process."""

    async def read(self, namespace: str) -> None:
        async with connected(namespace) as client:
            await ask(client, [FOR_EVER])

    async def pid(self) -> int:
        return os.getpid()


@pytest.mark.slow
async def test_the_channel_of_a_killed_gateway_is_closed(coordinator: ActorHandle, cluster: str) -> None:
    gateway = Gateway.remote()  # type: ignore[attr-defined]
    pid = await gateway.pid.remote()
    gateway.read.remote(cluster)
    await until(coordinator.channels, lambda channels: channels == 1)
    os.kill(pid, signal.SIGKILL)
    await until(coordinator.channels, lambda channels: channels == 0)
