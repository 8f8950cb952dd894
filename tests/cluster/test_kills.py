"""Claim: a service on one machine recovers from random kills under load; `test_faults.py` tests a cluster.

In a round, eight streams begin, one target is killed, all streams end, and the service must answer again by itself or,
after a kill of all processes, after a restart by its operator.
"""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.budget.client import STEPS_AHEAD
from tests.cluster.clients import STREAMS, Clients
from tests.cluster.invariants import broken
from tests.conftest import PARTS
from tests.running import RunningService, configure, own_ensemble, running, settled

pytestmark = pytest.mark.slow

EVERYTHING = "everything"
TOKENS = 64
LEASE = 16
LOST = 2 * max(LEASE, STEPS_AHEAD * STREAMS) + 3 * STREAMS
"""The tokens that a killed coordinator can leave charged: two leases, the current step, and lost deliveries."""
RECOVERY_S = 180.0
"""An engine starts slowly on a busy machine."""
TARGETS = ("Shard", "Budget", "Coordinator", "ServeReplica", "Fleet", "ProxyActor", EVERYTHING)
"""Ray's process titles of a shard, the budget actor, a coordinator, a gateway replica, the fleet and the proxy."""
BREAK_STREAMS = ("ServeReplica", "ProxyActor", EVERYTHING)
"""The processes on the path of an answer to its client."""


@pytest.fixture(scope="module")
def breakable(ensemble: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("kills")
    sections: dict[str, Any] = {"budget": {"lease_tokens": LEASE}, "coordinator": {"recovery_s": RECOVERY_S}}
    with running(configure(folder, own_ensemble(ensemble, folder), **sections)) as service:
        yield service


@pytest.fixture(scope="module")
def clients(breakable: RunningService) -> Clients:
    return Clients(breakable.base_url)


def run_round(service: RunningService, clients: Clients, target: str, moment: float) -> None:
    with clients.streaming() as ended:
        time.sleep(moment)
        if target == EVERYTHING:
            service.kill_everything()
        else:
            service.kill(target)
    if target == EVERYTHING:
        assert any(transcript.end is None for transcript in ended), "the kill came after the end of all streams"
        service.start()
    if target not in BREAK_STREAMS:
        assert all(transcript.end is not None for transcript in ended), ended
    clients.answers_again(60)
    assert clients.received > 0
    assert not broken(service.ledger, clients.transcripts, [PARTS])


@pytest.mark.parametrize(
    "target",
    [
        *TARGETS[:4],
        *(pytest.param(target, marks=pytest.mark.long) for target in TARGETS[4:]),
    ],
)
def test_no_token_is_received_that_was_not_charged(
    breakable: RunningService, clients: Clients, target: str, record_property: Callable[[str, object], None]
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    record_property("seed", seed)
    run_round(breakable, clients, target, random.Random(seed).uniform(0.2, 2.0))


def test_a_stream_outlives_its_coordinator_and_costs_at_most_what_was_under_way(breakable: RunningService) -> None:
    before = settled(breakable)
    clients = Clients(breakable.base_url)
    with clients.streaming(max_tokens=TOKENS) as ended:
        time.sleep(1)
        breakable.kill("Coordinator")
    for transcript in ended:
        assert transcript.end == "stop" or (transcript.end, transcript.tokens) == ("length", TOKENS)
    charged = settled(breakable) - before
    assert clients.received <= charged <= clients.received + LOST


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_twenty_kills_at_random_moments(breakable: RunningService, clients: Clients) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(20):
        target, moment = TARGETS[number % len(TARGETS)], chance.uniform(0.0, 3.0)
        run_round(breakable, clients, target, moment)
        print(f"round {number}: {target} after {moment:.2f} s; {clients.received} tokens received so far")
