"""Claim: after random faults of disks, clocks, servers and writers, each grant is in the one chain of the anchor.

Each schedule has real writers, each a process, on SQLite or PostgreSQL. SCHEDULES sets the number of random schedules.
`tests.cluster.test_faults` does the same with a whole cluster.
"""

import json
import os
import random
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import psutil
import pytest

from privmix.budget.anchor import ChainEnd, DirectoryAnchor
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.rows import every_row
from tests.disks import Clock, Disk, mounted, unavailable
from tests.postgresql import Server, running
from tests.services.budget import writers
from tests.services.budget.processes import spawn

TERMS = PrivacyBudget(ensemble="clinic", epsilon=1e6, delta=1e-5, order=8.0, adjacency="one part added or removed")
PATIENCE_S = 120.0
"""A limit for hung runs. Grants are expected within seconds on an idle machine."""
LONGEST_S = 1.5
SYNCHRONOUS_S = 2.5
"""Longer than a writer of these tests waits for a silent server."""

Backend = Literal["sqlite", "postgresql"]

UNAVAILABLE = unavailable()

pytestmark = [pytest.mark.slow, pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")]


@dataclass
class Machine:
    """The disks, the clock and the database server of all schedules."""

    ledgers: Disk
    anchors: Disk
    servers: Disk
    clock: Clock
    server: Server


@contextmanager
def machine() -> Iterator[Machine]:
    with ExitStack() as undo:
        folders = [Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="pmx-"))) for _ in range(4)]
        for folder in folders:
            folder.chmod(0o755)
        ledgers, anchors, servers = (
            undo.enter_context(mounted(folder, size)) for folder, size in zip(folders[:3], (16, 1, 400), strict=True)
        )
        clock = Clock(folders[3])
        server = undo.enter_context(running(servers.path, clock.environment))
        yield Machine(ledgers, anchors, servers, clock, server)


@dataclass
class Writer:
    process: BaseProcess
    connection: Connection
    place: str
    holder: str


@dataclass
class World:
    """One ledger, its copies and its writers, in one schedule. `granted` holds the tokens of each reported grant."""

    machine: Machine
    backend: Backend
    chance: random.Random
    compares_rows: bool = False
    places: list[str] = field(default_factory=list)
    writers: list[Writer] = field(default_factory=list)
    granted: dict[str, int] = field(default_factory=dict)
    crashes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = [self._new_place()]
        anchor = DirectoryAnchor(self.machine.anchors.path)
        self.id = Ledger.create(self.places[0], TERMS, anchors=(anchor,), holder="first").balance().id
        self.begin(self.places[0], "first")

    def begin(self, place: str, holder: str) -> None:
        """Starts a writer."""
        process, connection = spawn(
            writers.lease_under_faults, place, TERMS, self.machine.anchors.path, holder, self.compares_rows
        )
        self.writers.append(Writer(process, connection, place, holder))

    def record(self) -> None:
        """Records what the writers have reported."""
        for writer in self.writers:
            with suppress(EOFError, OSError):
                while writer.connection.poll():
                    match writer.connection.recv():
                        case "grant", name, count:
                            self.granted[name] = count
                        case "crash", error:
                            self.crashes.append(error)

    def lasts(self, seconds: float | None = None) -> None:
        """Lets time pass, in which writers report."""
        deadline = time.monotonic() + (self.chance.uniform(0.3, LONGEST_S) if seconds is None else seconds)
        while time.monotonic() < deadline:
            self.record()
            time.sleep(0.02)

    def copied(self) -> str:
        """Returns a copy of the ledger's present database, as a promoted standby or a clone of a volume has it."""
        if self.backend == "postgresql":
            return self.machine.server.url(self.machine.server.copy(self.places[0]))
        copy = f"{self.places[0]}.{len(self.places)}"
        with closing(sqlite3.connect(self.places[0])) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        return copy

    def grants(self) -> bool:
        """Returns whether a writer gets a grant within `PATIENCE_S`."""
        deadline, before = time.monotonic() + PATIENCE_S, len(self.granted)
        while len(self.granted) == before:
            if time.monotonic() > deadline:
                return False
            self.record()
            time.sleep(0.02)
        return True

    def end(self) -> None:
        for writer in self.writers:
            writer.process.kill()
            writer.process.join()
        self.record()

    def violations(self) -> list[str]:
        """Describes what must not be."""
        end = DirectoryAnchor(self.machine.anchors.path).read(self.id)
        assert end is not None
        chains = [chain for place in self.places if (chain := _chain(place, end)) is not None]
        found = [f"a writer failed with {crash}" for crash in self.crashes]
        if not chains:
            found.append("no copy has the chain of the anchor")
        lost = {name for chain in chains for name, count in self.granted.items() if chain.get(name) != count}
        if lost:
            found.append(f"{len(lost)} of {len(self.granted)} grants are not in the chain of the anchor")
        if end.tokens.total() < sum(self.granted.values()):
            found.append(f"{sum(self.granted.values())} tokens were granted, and the anchor has {end.tokens.total()}")
        return found

    def _new_place(self) -> str:
        if self.backend == "postgresql":
            return self.machine.server.database()
        for old in self.machine.ledgers.path.iterdir():
            old.unlink()
        return str(self.machine.ledgers.path / "ledger.db")


def _chain(place: str, end: ChainEnd) -> dict[str, int] | None:
    """Returns the tokens of the leases in a place by their names; None if its chain does not contain the end."""
    with LedgerDatabase(place, "read").transaction() as connection:
        if end.row not in [(row.seq, row.hash) for row in every_row(connection)]:
            return None
        leases = [json.loads(row.body) for row in every_row(connection) if row.kind == "lease"]
        return {lease["lease"]: lease["count"] for lease in leases}


def kill_a_writer(world: World) -> None:
    writer = world.chance.choice(world.writers)
    writer.process.kill()
    world.lasts()
    world.begin(writer.place, writer.holder)


def pause_a_writer_beside_its_successor(world: World) -> None:
    writer = world.chance.choice(world.writers)
    with suppress(psutil.NoSuchProcess):  # it may have been refused
        process = psutil.Process(writer.process.pid)
        process.suspend()
        world.begin(writer.place, writer.holder)
        world.lasts()
        process.resume()


def replace_the_deployment(world: World) -> None:
    world.begin(world.places[0], f"deployment {len(world.writers)}")
    world.lasts()


def split_the_brain(world: World) -> None:
    """A copy with all rows gets a writer, while those of the original go on."""
    world.places.append(world.copied())
    world.begin(world.places[-1], world.chance.choice(["first", "there"]))
    world.lasts()


def split_the_brain_during_a_pause(world: World) -> None:
    """A copy with all rows gets a writer while those of the original stand still, and they go on beside it."""
    paused = [psutil.Process(writer.process.pid) for writer in world.writers if writer.process.is_alive()]
    for process in paused:
        process.suspend()
    try:
        world.record()
        split_the_brain(world)
    finally:
        for process in paused:
            process.resume()
    world.lasts()


def fill_the_anchors_disk(world: World) -> None:
    with world.machine.anchors.full():
        world.lasts()


def make_the_anchors_disk_read_only(world: World) -> None:
    with world.machine.anchors.read_only():
        world.lasts()


def fill_the_disk(world: World) -> None:
    disk = world.machine.ledgers if world.backend == "sqlite" else world.machine.servers
    with disk.full():
        world.lasts()
    if world.backend == "postgresql":  # a server that cannot write its log ends
        world.machine.server.start()


def make_the_disk_read_only(world: World) -> None:
    with world.machine.ledgers.read_only():
        world.lasts()


def kill_the_server(world: World) -> None:
    world.machine.server.kill()
    world.lasts(world.chance.uniform(0.0, 0.5))
    world.machine.server.start()


def hang_the_server(world: World) -> None:
    with world.machine.server.hanging():
        world.lasts(SYNCHRONOUS_S)


def lose_the_standby(world: World) -> None:
    with world.machine.server.awaiting_a_standby():
        world.lasts(SYNCHRONOUS_S)


def move_the_clock(world: World) -> None:
    world.machine.clock.move(world.chance.choice([-1, 1]) * world.chance.choice([5, 3_600, 40 * 86_400]))
    world.lasts()
    if world.chance.random() < 0.5:
        world.machine.clock.move(0)


Fault = Callable[[World], None]

COMMON: tuple[Fault, ...] = (
    kill_a_writer,
    pause_a_writer_beside_its_successor,
    replace_the_deployment,
    split_the_brain,
    split_the_brain_during_a_pause,
    fill_the_anchors_disk,
    make_the_anchors_disk_read_only,
    fill_the_disk,
)
FAULTS: dict[Backend, tuple[Fault, ...]] = {
    "sqlite": (*COMMON, make_the_disk_read_only),
    "postgresql": (*COMMON, kill_the_server, hang_the_server, lose_the_standby, move_the_clock),
}


@dataclass(frozen=True)
class Schedule:
    """Two to four faults, one after another."""

    seed: int
    backend: Backend
    faults: tuple[Fault, ...]

    @classmethod
    def drawn(cls, seed: int) -> "Schedule":
        chance = random.Random(seed)
        backend: Backend = chance.choice(("sqlite", "postgresql"))
        return cls(seed, backend, tuple(chance.choices(FAULTS[backend], k=chance.randint(2, 4))))

    def run(self, machine: Machine, *, compares_rows: bool = False) -> list[str]:
        """Returns what went wrong."""
        machine.clock.move(0)
        world = World(machine, self.backend, random.Random(self.seed), compares_rows)
        try:
            assert world.grants(), "the first writer gets no grant"
            for fault in self.faults:
                fault(world)
            for place in world.places:
                world.begin(place, "last")
            silent = [] if world.grants() else [f"no grant within {PATIENCE_S:g} s after the faults"]
        finally:
            world.end()
        return silent + world.violations()


@pytest.fixture(scope="module")
def one_machine() -> Iterator[Machine]:
    with machine() as one:
        yield one


@pytest.mark.parametrize(
    ("backend", "fault"),
    [(backend, fault) for backend, faults in FAULTS.items() for fault in faults],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_each_grant_survives_each_fault(one_machine: Machine, backend: Backend, fault: Fault) -> None:
    found = Schedule(random.SystemRandom().randrange(2**32), backend, (fault,)).run(one_machine)
    assert not found


def test_each_grant_survives_random_schedules(one_machine: Machine) -> None:
    for seed in random.SystemRandom().sample(range(2**32), int(os.environ.get("SCHEDULES", "3"))):
        assert not Schedule.drawn(seed).run(one_machine), f"seed {seed}"


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_an_anchor_that_compares_rows_is_found(one_machine: Machine, backend: Backend) -> None:
    found = Schedule(1, backend, (split_the_brain_during_a_pause,)).run(one_machine, compares_rows=True)
    assert any("grants are not in the chain" in violation for violation in found)


def test_the_faults_are_planted(one_machine: Machine) -> None:
    """A fault without an effect would show nothing."""
    with one_machine.anchors.full(), pytest.raises(OSError, match="No space left"):
        (one_machine.anchors.path / "more").write_bytes(b"1" * 8192)
    with one_machine.ledgers.read_only(), pytest.raises(OSError, match="Read-only file system"):
        (one_machine.ledgers.path / "more").touch()
    with one_machine.server.connect() as connection:
        for shift in (3_600, 0):
            one_machine.clock.move(shift)
            row = connection.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()
            assert row is not None
            assert abs(float(row[0]) - time.time() - shift) < 600
