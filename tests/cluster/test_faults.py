"""Claim: after single and random faults of a cluster under load, no charge is lost and the service recovers.

    python -m tests.cluster.test_faults --schedules 50 --seed 1

runs many random schedules and prints the result of each.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import nodes, postgresql
from tests.cluster.clients import Clients, Transcript
from tests.cluster.faults import FAULTS, Fault, Schedule
from tests.cluster.invariants import broken
from tests.cluster.multinode import PARTS, ClusterService, serving
from tests.ensembles import write_ensemble

WHOLE = 0.9
"""The minimum share of complete answers among the streams whose gateway and head survive."""
PATIENCE_S = 180.0
"""A limit for hung tests. The target is one minute on an idle machine."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(nodes.unavailable() is not None, reason=nodes.unavailable() or ""),
]


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterService]:
    folder = tmp_path_factory.mktemp("faults")
    # Starts its own server, because these tests kill it.
    with postgresql.running() as server, serving(folder, write_ensemble(folder, PARTS), server) as service:
        yield service


@dataclass(frozen=True)
class Round:
    """The result of eight streams during the faults of a schedule.

    Attributes:
        seconds: the time from the last fault until the service answered again.
        streams: the streams of the round, without those whose gateway or head a fault may have ended.
    """

    seconds: float
    streams: tuple[Transcript, ...]


def round_of(service: ClusterService, clients: Clients, schedule: Schedule) -> Round:
    may_break = schedule.may_break_streams(service)
    with clients.streaming(max_tokens=24) as ended:
        schedule.run(service)
        seconds = clients.answers_again(PATIENCE_S, service.supervise)
    service.wait_until_healthy(PATIENCE_S)
    return Round(seconds, () if may_break else tuple(ended))


def whole(streams: Sequence[Transcript]) -> float:
    """Returns the share of streams with a complete answer."""
    return sum(stream.end is not None for stream in streams) / len(streams) if streams else 1.0


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_nothing_is_lost(clustered: ClusterService, fault: Fault) -> None:
    clients = Clients(clustered.base_url)
    seed = random.SystemRandom().randrange(2**32)
    found = round_of(clustered, clients, Schedule(seed, ((1.0, fault),)))
    print(f"{fault}, seed {seed}: answers {found.seconds:.0f} s after it")
    assert whole(found.streams) >= WHOLE
    assert clients.received > 0
    assert not broken(clustered.ledger, [*clients.transcripts, *clustered.elsewhere], [PARTS])


def test_nothing_is_lost_on_random_schedules(clustered: ClusterService) -> None:
    clients = Clients(clustered.base_url)
    streams: list[Transcript] = []
    for seed in random.SystemRandom().sample(range(2**32), 2):
        schedule = Schedule.drawn(seed)
        print(f"seed {seed}: {schedule}")
        streams += round_of(clustered, clients, schedule).streams
        assert not broken(clustered.ledger, [*clients.transcripts, *clustered.elsewhere], [PARTS])
    assert whole(streams) >= WHOLE


def main() -> None:
    """Runs many schedules on one cluster and prints a report. Exits with 1 if an invariant is violated."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--schedules", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    chosen = parser.parse_args()
    seconds: list[float] = []
    streams: list[Transcript] = []
    found: list[str] = []
    with tempfile.TemporaryDirectory() as name, postgresql.running() as server:
        folder = Path(name)
        with serving(folder, write_ensemble(folder, PARTS), server) as service:
            clients = Clients(service.base_url)
            for number in range(chosen.schedules):
                schedule = Schedule.drawn(chosen.seed + number)
                try:
                    became = round_of(service, clients, schedule)
                except TimeoutError as error:
                    found.append(f"seed {schedule.seed}, {schedule}: {error}")
                    break
                seconds.append(became.seconds)
                streams += became.streams
                found += broken(service.ledger, [*clients.transcripts, *service.elsewhere], [PARTS])
                ended = f"{sum(stream.end is not None for stream in became.streams)} of {len(became.streams)}"
                print(
                    f"{number + 1:3} seed {schedule.seed}: {schedule}: back after {became.seconds:.0f} s, "
                    f"{ended} streams that had their gateway ended whole",
                    flush=True,
                )
    if whole(streams) < WHOLE:
        found.append(f"{whole(streams):.0%} of the streams that had their gateway ended whole, not {WHOLE:.0%}")
    report = {
        "schedules": len(seconds),
        "streams": len(clients.transcripts),
        "streams_broken": sum(transcript.end is None for transcript in clients.transcripts),
        "streams_that_had_their_gateway": {"number": len(streams), "whole": whole(streams)},
        "tokens_received": clients.received,
        "seconds_to_answer": {"median": statistics.median(seconds), "max": max(seconds)} if seconds else {},
        "invariants_broken": found,
    }
    print(json.dumps(report, indent=2))
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
