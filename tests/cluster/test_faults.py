"""Claim: after single, joint and random faults of a cluster under load, every token is charged once and heard once.

SCHEDULES sets the number of random schedules. `test_actors.py` shows that the checks find faults that are put in.
"""

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from privmix.keys.actor import HEARTBEAT_TIMEOUT_S
from tests import disks, nodes, postgresql
from tests.cluster.clients import Clients
from tests.cluster.faults import FAULTS, PATIENCE_S, Fault, Schedule
from tests.cluster.invariants import charge_violations, text_violations
from tests.cluster.multinode import PARTS, ClusterService, serving
from tests.counting import write_counting_model
from tests.disks import mounted
from tests.ensembles import write_ensemble
from tests.support.waiting import until

HELD_S = HEARTBEAT_TIMEOUT_S + 60.0
STREAM_TOKENS = 24
SERVER_MEGABYTES = 600

UNAVAILABLE = nodes.unavailable() or disks.unavailable()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or ""),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterService]:
    """A cluster that serves the counting model, with a database server of its own, because faults kill it."""
    folder = tmp_path_factory.mktemp("faults")
    ensemble = write_ensemble(folder / "counting", PARTS, model=write_counting_model(folder / "model"))
    with (
        tempfile.TemporaryDirectory(prefix="pmx-") as place,
        mounted(Path(place), SERVER_MEGABYTES) as disk,
        postgresql.running(disk.path) as server,
        serving(folder, ensemble, server) as service,
    ):
        yield service


def violations(service: ClusterService, schedule: Schedule) -> list[str]:
    """Runs eight streams during the faults of a schedule, and describes each invariant that does not hold.

    Raises:
        TimeoutError: the service does not answer, or charges do not come to rest.
    """
    clients = Clients(service.base_url, service.secrets)
    may_break, before = schedule.may_break_streams(service), service.charges_at_rest()
    service.elsewhere.clear()
    service.violations.clear()
    with clients.streaming(max_tokens=STREAM_TOKENS) as ended:
        schedule.run(service)
        print(f"{schedule}: answers {clients.answers_again(PATIENCE_S, service.supervise):.0f} s after it")
    service.wait_until_healthy(PATIENCE_S)
    after = service.charges_at_rest()
    streams = [*clients.transcripts, *service.elsewhere]
    # A request that is refused before its first token was not begun; clients repeat it.
    broken = [stream for stream in ended if stream.tokens and not stream.is_whole and not may_break]
    return [
        *service.violations,
        *text_violations(streams),
        *charge_violations(before, after, streams, schedule.margin, [PARTS]),
        *(f"a stream broke: {stream}" for stream in broken),
    ]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_nothing_is_lost(service: ClusterService, fault: Fault) -> None:
    seed = random.SystemRandom().randrange(2**32)
    assert violations(service, Schedule(seed, ((1.0, fault),))) == [], f"seed {seed}"


def test_nothing_is_lost_on_random_schedules(service: ClusterService) -> None:
    for seed in random.SystemRandom().sample(range(2**32), int(os.environ.get("SCHEDULES", "2"))):
        assert violations(service, Schedule.drawn(seed)) == [], f"seed {seed}"
    # Until the service has noticed every lost gateway, requests hold tokens of shares.
    until(lambda: not service.held_by_requests(), HELD_S, lambda: f"{service.held_by_requests()} are held", pause_s=1.0)
