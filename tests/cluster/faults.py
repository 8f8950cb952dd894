"""Injects faults into a cluster, on real processes and a real network, one after another or two at once."""

import random
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import psutil

from tests.cluster.clients import Clients
from tests.cluster.invariants import Margin
from tests.cluster.multinode import COORDINATORS, MAX_LEASE, ClusterService
from tests.disks import Disk

SHORT_S = 4.0
LONG_S = 12.0
"""A duration after which Ray has given up a node (`tests.nodes.ENVIRONMENT`)."""
HANG_S = 25.0
"""Longer than the gateways wait for the keys' database."""
PATIENCE_S = 300.0
"""A limit for hung runs. Answers are expected within a minute on an idle machine."""
PROBE_TOKENS = 64
PROBE_S = 20.0
"""A probe of a service that may not answer. It asks for more tokens than the leases of all coordinators hold."""

Strike = Callable[[ClusterService, random.Random], None]


@dataclass(frozen=True)
class Fault:
    """One fault. `strike` injects it and returns when the fault is over.

    Attributes:
        carrier: the component on the path of streams to clients that the fault takes away: "gateway" for the gateways,
            their proxies and the head, "worker" for a worker node, on which a gateway may run.
        leases, kills, steps, abandoned: what the fault may add to the fields of `Margin`.
        needs: a resource that only one fault can use at a time: the database, the spare node, or the anchor's disk.
        is_alone: whether no other fault may happen meanwhile.
    """

    name: str
    strike: Strike
    carrier: Literal["gateway", "worker"] | None = None
    leases: int = 0
    kills: int = 0
    steps: int = 0
    abandoned: int = 0
    needs: Literal["database", "spare", "anchor"] | None = None
    is_alone: bool = False

    def may_break_streams(self, gateway_on_a_worker: bool) -> bool:
        """Tells whether clients may lose answers, which only the loss of a carrier may cause."""
        return self.carrier == "gateway" or (self.carrier == "worker" and gateway_on_a_worker)

    def fits_beside(self, other: "Fault") -> bool:
        """Tells whether both faults can happen at once."""
        return not (self.is_alone or other.is_alone or (self.needs is not None and self.needs == other.needs))

    def __str__(self) -> str:
        return self.name


def _kills(title: str, *, every: bool = False) -> Strike:
    def strike(service: ClusterService, chance: random.Random) -> None:
        found = service.processes(title)  # an earlier fault may have ended the process
        for _, process in found if every else chance.sample(found, min(1, len(found))):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    return strike


def _hang_a_shard(service: ClusterService, chance: random.Random) -> None:
    if found := service.processes("Shard"):
        _, process = chance.choice(found)
        with suppress(psutil.NoSuchProcess):
            process.suspend()
            time.sleep(SHORT_S)
            process.resume()


def _kill_a_worker(service: ClusterService, chance: random.Random) -> None:
    chance.choice(service.nodes.workers).kill()


def _kill_the_head(service: ClusterService, chance: random.Random) -> None:
    service.nodes.head.kill()


def _drops_the_network(seconds: float) -> Strike:
    def strike(service: ClusterService, chance: random.Random) -> None:
        node = chance.choice(service.nodes.workers)
        node.cut()
        time.sleep(seconds)
        node.mend()

    return strike


def _part_the_budget_from_the_rest(service: ClusterService, chance: random.Random) -> None:
    """Ray gives up the actor's node and starts another budget actor while the old one still reaches the database."""
    for node, _ in service.processes("Budget"):
        node.cut()
        time.sleep(LONG_S)
        node.mend()


def _fail_the_database(service: ClusterService, chance: random.Random) -> None:
    """Kills the database. Under load, a commit is usually in progress."""
    service.database.kill()
    time.sleep(chance.uniform(0.0, SHORT_S))
    service.database.start()


def _hangs_the_database(seconds: float) -> Strike:
    def strike(service: ClusterService, chance: random.Random) -> None:
        with service.database.hanging():
            time.sleep(seconds)

    return strike


def _roll_the_ledger_back(service: ClusterService, chance: random.Random) -> None:
    """Restores an older copy of the ledger under the running service. It may grant nothing until `ledger forfeit`."""
    clients = Clients(service.base_url, service.secrets)
    copy = service.database.copy(service.ledger)
    clients.answers_again(PATIENCE_S, service.supervise)
    granted = clients.received
    service.database.restore(service.ledger, copy)
    if clients.stream(0, PROBE_TOKENS, timeout_s=PROBE_S).is_whole:
        service.violations.append(f"a ledger without its last {granted} tokens granted {PROBE_TOKENS} more")
    if service.healthy():
        service.violations.append("a service with a rolled-back ledger was healthy")
    with service.stopped():
        refused = service.command(*service.serve_command(), check=False)
        if refused.returncode == 0 or "ledger forfeit" not in refused.stderr + refused.stdout:
            service.violations.append(f"a service with a rolled-back ledger started: {refused.stderr[-300:]}")
        service.command("ledger", "forfeit", "--config", str(service.config))
    service.elsewhere += clients.transcripts


def _lose_the_standby(service: ClusterService, chance: random.Random) -> None:
    """Commits wait for a synchronous standby, as after its loss, until it is back."""
    with service.database.awaiting_a_standby():
        time.sleep(LONG_S)


def _split_the_brain(service: ClusterService, chance: random.Random) -> None:
    """Promotes a copy of the ledger's database while the service goes on with the original."""
    copy = service.database.copy(service.ledger)
    clients = Clients(service.base_url, service.secrets)
    clients.answers_again(PATIENCE_S, service.supervise)
    service.elsewhere += clients.transcripts
    with service.another(service.database.url(copy)) as url:
        if url is not None:
            service.violations.append("two services on copies of one ledger were healthy at once")


def _fill_the_disk(service: ClusterService, chance: random.Random) -> None:
    with Disk(service.database.folder).full():
        time.sleep(SHORT_S)
    service.database.start()  # a server that cannot write its log ends


def _fill_the_anchors_disk(service: ClusterService, chance: random.Random) -> None:
    with service.anchors.full():
        time.sleep(SHORT_S)


def _abort_an_upgrade(service: ClusterService, chance: random.Random) -> None:
    """The next version becomes ready and is withdrawn before a client reaches it."""
    with service.another() as url:
        assert url is not None
        time.sleep(chance.uniform(0.0, SHORT_S))


def _revert_an_upgrade(service: ClusterService, chance: random.Random) -> None:
    """The next version takes the ledger over with its first stream, and is withdrawn."""
    with service.another() as url:
        assert url is not None
        clients = Clients(url, service.secrets)
        clients.answers_again(LONG_S)
        service.elsewhere += clients.transcripts


ALL = COORDINATORS

FAULTS = (
    Fault("shard", _kills("Shard"), steps=1),
    Fault("every shard", _kills("Shard", every=True), steps=1),
    Fault("shard that hangs", _hang_a_shard, steps=1),
    Fault("coordinator", _kills("Coordinator"), leases=1, kills=1),
    Fault("budget actor", _kills("Budget")),
    Fault("fleet", _kills("Fleet")),
    Fault("keys actor", _kills("Keys")),
    Fault("Serve replica", _kills("ServeReplica"), "gateway"),
    Fault("Serve controller", _kills("ServeController")),
    Fault("proxy", _kills("HAProxyManager"), "gateway"),
    Fault("worker node", _kill_a_worker, "worker", leases=ALL, kills=ALL, steps=1),
    Fault("head", _kill_the_head, "gateway", leases=ALL, kills=ALL),
    Fault("network, short", _drops_the_network(SHORT_S), "worker", leases=ALL, abandoned=ALL),
    Fault("network, long", _drops_the_network(LONG_S), "worker", leases=ALL, abandoned=ALL),
    Fault("network of the budget actor", _part_the_budget_from_the_rest, "worker", leases=ALL, abandoned=ALL),
    Fault("database", _fail_the_database, leases=ALL, needs="database"),
    Fault("database that hangs", _hangs_the_database(HANG_S), leases=ALL, needs="database"),
    # The leases that were open in the copy, and those that are open when the service is stopped.
    Fault("ledger rolled back", _roll_the_ledger_back, "gateway", leases=2 * ALL, is_alone=True),
    Fault("standby that is lost", _lose_the_standby, leases=ALL, needs="database"),
    Fault("full disk", _fill_the_disk, leases=ALL, needs="database"),
    Fault("full disk of the anchor", _fill_the_anchors_disk, leases=ALL, needs="anchor"),
    Fault("split brain", _split_the_brain, leases=ALL, is_alone=True),
    Fault("upgrade, aborted", _abort_an_upgrade, needs="spare"),
    # The former deployment cannot settle its leases while the next one has the ledger.
    Fault("upgrade, reverted", _revert_an_upgrade, leases=ALL + 1, needs="spare"),
)


@dataclass(frozen=True)
class Schedule:
    """Faults, each with its delay in seconds: one after another, or all at once.

    Attributes:
        overlaps: whether each delay counts from the beginning of the schedule, not from the end of the fault before.
    """

    seed: int
    faults: tuple[tuple[float, Fault], ...]
    overlaps: bool = False

    @classmethod
    def drawn(cls, seed: int) -> "Schedule":
        """Draws one to three faults in sequence, or two at once."""
        chance = random.Random(seed)
        overlaps = chance.random() < 0.5
        faults = _pair(chance) if overlaps else chance.sample(FAULTS, chance.randint(1, 3))
        return cls(seed, tuple((chance.uniform(0.0, 3.0), fault) for fault in faults), overlaps)

    def __str__(self) -> str:
        joint = " beside " if self.overlaps else ", "
        return joint.join(f"{fault} after {delay:.1f} s" for delay, fault in self.faults)

    @property
    def margin(self) -> Margin:
        """The tokens that the faults may leave charged although no client received them."""
        faults = [fault for _, fault in self.faults]
        return Margin(
            lost_leases=sum(fault.leases for fault in faults),
            lease_tokens=MAX_LEASE,
            kills=sum(fault.kills for fault in faults),
            steps=sum(fault.steps for fault in faults),
            abandoned=sum(fault.abandoned for fault in faults),
        )

    def may_break_streams(self, service: ClusterService) -> bool:
        """See `Fault.may_break_streams`. Call it before the run."""
        on_a_worker = any(not node.is_head for node, _ in service.processes("ServeReplica:privmix:gateway"))
        return any(fault.may_break_streams(on_a_worker) for _, fault in self.faults)

    def run(self, service: ClusterService) -> None:
        if not self.overlaps:
            for number in range(len(self.faults)):
                self._strike(service, number)
            return
        with ThreadPoolExecutor(len(self.faults)) as pool:
            for strike in [pool.submit(self._strike, service, number) for number in range(len(self.faults))]:
                strike.result()

    def _strike(self, service: ClusterService, number: int) -> None:
        delay, fault = self.faults[number]
        time.sleep(delay)
        fault.strike(service, random.Random(f"{self.seed} {number}"))


def _pair(chance: random.Random) -> Sequence[Fault]:
    """Returns two different faults that can happen at once."""
    while True:
        first, second = chance.sample(FAULTS, 2)
        if first.fits_beside(second):
            return first, second
