"""Claim: after single, joint and random faults of a cluster under load, every token is charged once and heard once.

    python -m tests.cluster.test_faults --schedules 100 --seed 1 --json report.json

runs many random schedules and prints the result of each. `tests.cluster.invariants` states what must hold, and
`test_invariants.py` and `test_planted_faults.py` show that the checks find faults that are put in.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from privmix.keys.actor import HEARTBEAT_TIMEOUT_S
from tests import disks, nodes, postgresql
from tests.cluster.clients import Clients, Transcript
from tests.cluster.faults import FAULTS, PATIENCE_S, Fault, Schedule
from tests.cluster.invariants import charge_violations, text_violations
from tests.cluster.multinode import PARTS, ClusterService, serving
from tests.counting import write_counting_model
from tests.disks import Clock, mounted
from tests.ensembles import write_ensemble

ANSWERED_S = 60.0
ANSWERED_SHARE = 0.95
"""The share of schedules after which the service answers within `ANSWERED_S`."""
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
    rounds: list[Round] = field(default_factory=list)

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
        self.rounds.append(Round(seconds, () if may_break else tuple(heard), violations))
        return self.rounds[-1]

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
    for seed in random.SystemRandom().sample(range(2**32), 2):
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
    with ExitStack() as undo:
        places = [Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="pmx-"))) for _ in range(2)]
        for place in places:
            place.chmod(0o755)
        disk, clock = undo.enter_context(mounted(places[0], SERVER_MEGABYTES)), Clock(places[1])
        server = undo.enter_context(postgresql.running(disk.path, clock.environment))
        service = undo.enter_context(serving(folder, ensemble, server, clock))
        yield Checker(service)


def report_of(checker: Checker, failures: Sequence[str], schedules: int) -> dict[str, Any]:
    """Returns the results of a run, and what fell short under "failures"."""
    rounds = checker.rounds
    seconds = [found.seconds for found in rounds]
    in_time = sum(value <= ANSWERED_S for value in seconds) / schedules
    streams = [stream for found in rounds for stream in found.streams]
    transcripts = [*checker.clients.transcripts]
    late = f"answered within {ANSWERED_S:g} s after {in_time:.0%} of the schedules, not {ANSWERED_SHARE:.0%}"
    return {
        "schedules": {"planned": schedules, "run": len(rounds)},
        "answered_within_60_s": in_time,
        "seconds_to_answer": {"median": statistics.median(seconds), "max": max(seconds)} if seconds else {},
        "streams": {
            "all": len(transcripts),
            "refused": sum(not stream.is_whole and not stream.tokens for stream in transcripts),
            "that_kept_their_gateway": len(streams),
            "of_these_whole": sum(stream.is_whole for stream in streams),
        },
        "tokens_received": checker.clients.received,
        "failures": [*failures, *([late] if in_time < ANSWERED_SHARE else [])],
    }


def failures_of(schedule: Schedule, found: Round) -> list[str]:
    broken = [f"the answer to {stream.start} broke off: {stream.refusal}" for stream in found.broken]
    return [f"seed {schedule.seed}, {schedule}: {failure}" for failure in (*found.violations, *broken)]


def main() -> None:
    """Runs many schedules on one cluster. Exits with 1 if an invariant fails, a stream breaks or answers are late.

    A schedule after which the service does not answer at all ends the run.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to a file too")
    chosen = parser.parse_args()
    failures: list[str] = []
    console = Console(stderr=True, soft_wrap=True)
    with tempfile.TemporaryDirectory() as name, checking(Path(name)) as checker, Progress(console=console) as progress:
        task = progress.add_task("schedules", total=chosen.schedules)
        for number in range(chosen.schedules):
            schedule = Schedule.drawn(chosen.seed + number)
            try:
                found = checker.run(schedule)
            except TimeoutError as error:
                failures.append(f"seed {schedule.seed}, {schedule}: {error}")
                break
            failures += failures_of(schedule, found)
            whole = f"{len(found.streams) - len(found.broken)} of {len(found.streams)} streams whole"
            progress.console.print(
                f"{number + 1:3} seed {schedule.seed}: {schedule}: answers after {found.seconds:.0f} s, {whole}"
            )
            for violation in failures_of(schedule, found):
                progress.console.print(f"    [red]{violation}[/red]")
            progress.advance(task)
        failures += checker.left_held()
        report = report_of(checker, failures, chosen.schedules)
    text = json.dumps(report, indent=2)
    print(text)
    if chosen.json is not None:
        chosen.json.write_text(text + "\n")
    sys.exit(bool(report["failures"]))


if __name__ == "__main__":
    main()
