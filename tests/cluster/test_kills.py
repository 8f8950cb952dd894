"""Claim: a service on one machine recovers from random kills under load; `test_faults.py` tests a cluster.

In a round, eight streams begin, one target is killed, all streams end, and the service must answer again by itself or,
after a kill of all processes, after a restart by its operator.
"""

import random
import time
from collections.abc import Callable, Iterator

import pytest

from privmix.budget.client import STEPS_AHEAD
from tests.cluster.charges import Charges
from tests.cluster.clients import STREAMS, Clients
from tests.cluster.invariants import Margin, charge_violations, text_violations
from tests.conftest import PARTS
from tests.counting import write_counting_model
from tests.ensembles import write_ensemble
from tests.running import RunningService, configure, running, settled

pytestmark = pytest.mark.slow

EVERYTHING = "everything"
TOKENS = 64
LEASE = 16
MAX_LEASE = max(LEASE, STEPS_AHEAD * STREAMS)
PACE_S = 0.05
"""The counting model answers in milliseconds. Streams must last until the kill."""
RECOVERY_S = 180.0
"""An engine starts slowly on a busy machine."""
TARGETS = ("Shard", "Budget", "Coordinator", "ServeReplica", "Fleet", "ProxyActor", EVERYTHING)
"""Ray's process titles of a shard, the budget actor, a coordinator, a gateway replica, the fleet and the proxy."""
BREAK_STREAMS = ("ServeReplica", "ProxyActor", EVERYTHING)
"""The processes on the path of an answer to its client."""
MARGINS = {
    "Shard": Margin(steps=1),
    "Coordinator": Margin(lost_leases=1, lease_tokens=MAX_LEASE, kills=1),
    EVERYTHING: Margin(lost_leases=1, lease_tokens=MAX_LEASE),
}
"""The other targets own no leases and deliver every token, or none that the broken streams do not account for."""


@pytest.fixture(scope="module")
def breakable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("kills")
    ensemble = write_ensemble(folder / "ensemble", PARTS, model=write_counting_model(folder / "model"))
    coordinator = {"recovery_s": RECOVERY_S, "pace_s": PACE_S}
    with running(configure(folder, ensemble, budget={"lease_tokens": LEASE}, coordinator=coordinator)) as service:
        yield service


@pytest.fixture(scope="module")
def clients(breakable: RunningService) -> Clients:
    return Clients(breakable.base_url)


def run_round(service: RunningService, clients: Clients, target: str, moment: float) -> None:
    settled(service)
    before, begun = Charges.of(service.ledger), len(clients.transcripts)
    with clients.streaming(max_tokens=TOKENS) as ended:
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
    settled(service)
    after, streams = Charges.of(service.ledger), clients.transcripts[begun:]
    assert not text_violations(streams)
    assert not charge_violations(before, after, streams, margin=MARGINS.get(target, Margin()), parts=[PARTS])


@pytest.mark.parametrize("target", TARGETS)
def test_every_token_is_charged_and_heard_once_despite_a_kill(
    breakable: RunningService, clients: Clients, target: str, record_property: Callable[[str, object], None]
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    record_property("seed", seed)
    run_round(breakable, clients, target, random.Random(seed).uniform(0.2, 2.0))


@pytest.mark.timeout(2400)
def test_twenty_kills_at_random_moments(breakable: RunningService, clients: Clients) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(20):
        target, moment = TARGETS[number % len(TARGETS)], chance.uniform(0.0, 3.0)
        run_round(breakable, clients, target, moment)
        print(f"round {number}: {target} after {moment:.2f} s; {clients.received} tokens received so far")
