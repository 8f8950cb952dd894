"""Processes are killed at random moments under load; whatever dies, no token was received that was not charged.

A round: eight streams begin, one target is killed without warning, the streams end one way or another, and the service
must answer again by itself (or, when everything was killed, when its operator starts it again).
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from services.budget.reader import read
from tests.running import RunningService, configure, own_ensemble, running

STREAMS = 8
EVERYTHING = "everything"
TARGETS = ("EngineHost", "Conductor", "Keeper", "ServeReplica", EVERYTHING)
"""The classes behind shard, coordinator, budget actor and gateway replica, as Ray's process titles show them."""


@pytest.fixture(scope="module")
def breakable(ensemble: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("kills")
    with running(configure(folder, own_ensemble(ensemble, folder))) as service:
        yield service


class Clients:
    """Streams through the real client, counting the tokens that really arrived."""

    def __init__(self, service: RunningService) -> None:
        self._client = openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="none", max_retries=0, timeout=120)
        self._lock = threading.Lock()
        self.received = 0

    def stream(self, number: int) -> bool:
        """One completion. Returns whether it came to its end."""
        tokens = 0
        try:
            chunks = self._client.completions.create(
                model="privmix",
                prompt=f"Once upon a time, in story number {number},",
                max_tokens=64,
                stream=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
            )
            for chunk in chunks:
                if chunk.usage:
                    tokens = chunk.usage.completion_tokens
            return True
        except openai.OpenAIError:
            return False
        finally:
            with self._lock:
                self.received += tokens

    def answers_again(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.stream(0):
            assert time.monotonic() < deadline, "no answer after the fault"
            time.sleep(0.5)


def strike(service: RunningService, target: str, moment: float) -> None:
    time.sleep(moment)
    if target == EVERYTHING:
        service.kill_everything()
    else:
        service.kill(target)


def run_round(service: RunningService, clients: Clients, target: str, moment: float) -> None:
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(clients.stream, number) for number in range(STREAMS)]
        strike(service, target, moment)
        ended = [stream.result() for stream in streams]
    if target == EVERYTHING:
        assert not all(ended), "the kill came too late to mean anything"
        service.start()
    clients.answers_again(60)
    charged = sum(read(service.ledger).charged.values())
    assert charged >= clients.received > 0, f"{clients.received} tokens received, {charged} charged"


@pytest.mark.parametrize("target", [*TARGETS[:-1], pytest.param(TARGETS[-1], marks=pytest.mark.slow)])
def test_no_token_is_received_that_was_not_charged(
    breakable: RunningService, target: str, record_property: Callable[[str, object], None]
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    record_property("seed", seed)
    run_round(breakable, Clients(breakable), target, random.Random(seed).uniform(0.2, 2.0))


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_twenty_kills_at_random_moments(breakable: RunningService) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    clients = Clients(breakable)
    for number in range(20):
        target, moment = TARGETS[number % len(TARGETS)], chance.uniform(0.0, 3.0)
        run_round(breakable, clients, target, moment)
        print(f"round {number}: {target} after {moment:.2f} s; {clients.received} tokens received so far")
