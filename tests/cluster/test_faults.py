"""Claim: after single, joint and random faults of a cluster under load, every token is charged once and heard once.

SCHEDULES sets the number of random schedules. `tests.cluster.invariants` states what must hold, and
`test_invariants.py` and `test_planted_faults.py` show that the checks find faults that are put in.
"""

import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from privmix.keys.actor import HEARTBEAT_TIMEOUT_S
from tests import disks, nodes, postgresql
from tests.cluster.clients import Clients, Transcript
from tests.cluster.faults import FAULTS, PATIENCE_S, Fault, Schedule
from tests.cluster.invariants import charge_violations, text_violations
from tests.cluster.multinode import PARTS, ClusterService, serving
from tests.counting import write_counting_model
from tests.disks import mounted
from tests.ensembles import write_ensemble

HELD_S = HEARTBEAT_TIMEOUT_S + 60.0
STREAM_TOKENS = 24
SERVER_MEGABYTES = 600

UNAVAILABLE = nodes.unavailable() or disks.unavailable()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or ""),
]


@dataclass(frozen=True)
class Round:
    """The result of eight streams during the faults of a schedule.

    Attributes:
        seconds: the time from the last fault until the service answered again.
        streams: the streams that had begun, without those whose gateway or head a fault may have ended.
        violations: the invariants that do not hold.
    """

    seconds: float
    streams: tuple[Transcript, ...]
    violations: tuple[str, ...]

    @property
    def broken(self) -> list[Transcript]:
        """The streams that had to be whole and are not."""
        return [stream for stream in self.streams if not stream.is_whole]


@dataclass
class Checker:
    """Runs schedules against one service and checks what its clients received."""

    service: ClusterService

    def __post_init__(self) -> None:
        self.clients = Clients(self.service.base_url, self.service.secrets)

    def run(self, schedule: Schedule) -> Round:
        """Runs one schedule.

        Raises:
            TimeoutError: the service does not answer, or charges do not come to rest.
        """
        service, clients = self.service, self.clients
        may_break = schedule.may_break_streams(service)
        before, begun = service.charges_at_rest(), len(clients.transcripts)
        service.elsewhere.clear()
        service.violations.clear()
        with clients.streaming(max_tokens=STREAM_TOKENS) as ended:
            schedule.run(service)
            seconds = clients.answers_again(PATIENCE_S, service.supervise)
        service.wait_until_healthy(PATIENCE_S)
        after = service.charges_at_rest()
        streams = [*clients.transcripts[begun:], *service.elsewhere]
        violations = (
            *service.violations,
            *text_violations(streams),
            *charge_violations(before, after, streams, schedule.margin, [PARTS]),
        )
        # A request that is refused before its first token was not begun; clients repeat it.
        heard = [stream for stream in ended if stream.is_whole or stream.tokens]
        return Round(seconds, () if may_break else tuple(heard), violations)

    def left_held(self) -> list[str]:
        """Describes shares that still hold tokens of requests, after the service has noticed every lost gateway."""
        deadline = time.monotonic() + HELD_S
        while held := self.service.held_by_requests():
            if time.monotonic() > deadline:
                return [f"{held} tokens of shares are held {HELD_S:g} s after the last request"]
            time.sleep(1)
        return []


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checker]:
    with checking(tmp_path_factory.mktemp("faults")) as checker:
        yield checker


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_nothing_is_lost(checker: Checker, fault: Fault) -> None:
    seed = random.SystemRandom().randrange(2**32)
    found = checker.run(Schedule(seed, ((1.0, fault),)))
    print(f"{fault}, seed {seed}: answers {found.seconds:.0f} s after it")
    assert not found.violations
    assert not found.broken


def test_nothing_is_lost_on_random_schedules(checker: Checker) -> None:
    for seed in random.SystemRandom().sample(range(2**32), int(os.environ.get("SCHEDULES", "2"))):
        schedule = Schedule.drawn(seed)
        print(f"seed {seed}: {schedule}")
        found = checker.run(schedule)
        assert not found.violations
        assert not found.broken
    assert not checker.left_held()


@contextmanager
def checking(folder: Path) -> Iterator[Checker]:
    """Runs a cluster that serves the counting model, with a database server of its own, because faults kill it."""
    ensemble = write_ensemble(folder / "counting", PARTS, model=write_counting_model(folder / "model"))
    with (
        tempfile.TemporaryDirectory(prefix="pmx-") as place,
        mounted(Path(place), SERVER_MEGABYTES) as disk,
        postgresql.running(disk.path) as server,
        serving(folder, ensemble, server) as service,
    ):
        yield Checker(service)
