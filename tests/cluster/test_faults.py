"""Parts of a cluster fail under load, one at a time and by chance: nothing is lost and the service comes back.

    python -m tests.cluster.test_faults --schedules 50 --seed 1

runs many random schedules and prints what became of each.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import nodes, postgresql
from tests.cluster.clients import Clients
from tests.cluster.faults import FAULTS, Fault, Schedule
from tests.cluster.invariants import broken
from tests.cluster.multinode import PARTS, ClusterService, serving
from tests.ensembles import write_ensemble

PATIENCE_S = 180.0
"""Ends a test that would never end. What is promised is a minute on a machine that does nothing else."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(nodes.unavailable() is not None, reason=nodes.unavailable() or ""),
]


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterService]:
    folder = tmp_path_factory.mktemp("faults")
    # A server of its own: these tests kill it.
    with postgresql.running() as server, serving(folder, write_ensemble(folder, PARTS), server) as service:
        yield service


def round_of(service: ClusterService, clients: Clients, schedule: Schedule) -> float:
    """Seconds until the service answers again after the schedule's last fault, under eight streams."""
    with clients.streaming(max_tokens=24):
        schedule.run(service)
        seconds = clients.answers_again(PATIENCE_S, service.supervise)
    service.wait_until_healthy(PATIENCE_S)
    return seconds


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_nothing_is_lost(clustered: ClusterService, fault: Fault) -> None:
    clients = Clients(clustered.base_url)
    seed = random.SystemRandom().randrange(2**32)
    seconds = round_of(clustered, clients, Schedule(seed, ((1.0, fault),)))
    print(f"{fault}, seed {seed}: answers {seconds:.0f} s after it")
    assert clients.received > 0
    assert not broken(clustered.ledger, clients.transcripts, [PARTS])


def test_nothing_is_lost_on_random_schedules(clustered: ClusterService) -> None:
    clients = Clients(clustered.base_url)
    for seed in random.SystemRandom().sample(range(2**32), 2):
        schedule = Schedule.drawn(seed)
        print(f"seed {seed}: {schedule}")
        round_of(clustered, clients, schedule)
        assert not broken(clustered.ledger, clients.transcripts, [PARTS])


def main() -> None:
    """Many schedules on one cluster, and a report; exits with 1 where an invariant did not hold."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--schedules", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    chosen = parser.parse_args()
    seconds, found = [], []
    with tempfile.TemporaryDirectory() as name, postgresql.running() as server:
        folder = Path(name)
        with serving(folder, write_ensemble(folder, PARTS), server) as service:
            clients = Clients(service.base_url)
            for number in range(chosen.schedules):
                schedule = Schedule.drawn(chosen.seed + number)
                try:
                    seconds.append(round_of(service, clients, schedule))
                except TimeoutError as error:
                    found.append(f"seed {schedule.seed}, {schedule}: {error}")
                    break
                found += broken(service.ledger, clients.transcripts, [PARTS])
                print(f"{number + 1:3} seed {schedule.seed}: {schedule}: back after {seconds[-1]:.0f} s", flush=True)
    report = {
        "schedules": len(seconds),
        "streams": len(clients.transcripts),
        "streams_broken": sum(transcript.end is None for transcript in clients.transcripts),
        "tokens_received": clients.received,
        "seconds_to_answer": {"median": statistics.median(seconds), "max": max(seconds)} if seconds else {},
        "invariants_broken": found,
    }
    print(json.dumps(report, indent=2))
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
