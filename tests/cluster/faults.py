"""Injects faults into a cluster, on real processes and a real network."""

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import psutil

from tests.cluster.clients import Clients
from tests.cluster.multinode import ClusterService

SHORT_S = 4.0
LONG_S = 12.0
"""A duration after which Ray has given up a node (`tests.nodes.ENVIRONMENT`)."""

Strike = Callable[[ClusterService, random.Random], None]


@dataclass(frozen=True)
class Fault:
    """One fault. `strike` injects it and returns when the fault is over.

    Attributes:
        carrier: the component on the path of streams to clients that the fault takes away: "gateway" for the gateways,
            their proxies and the head, "worker" for a worker node, on which a gateway may run.
    """

    name: str
    strike: Strike
    carrier: Literal["gateway", "worker"] | None = None

    def may_break_streams(self, gateway_on_a_worker: bool) -> bool:
        """Tells whether clients may lose answers, which only the loss of a carrier may cause."""
        return self.carrier == "gateway" or (self.carrier == "worker" and gateway_on_a_worker)

    def __str__(self) -> str:
        return self.name


def _kills(title: str) -> Strike:
    def strike(service: ClusterService, chance: random.Random) -> None:
        if found := service.processes(title):  # an earlier fault may have ended the process
            with suppress(psutil.NoSuchProcess):
                chance.choice(found)[1].send_signal(signal.SIGKILL)

    return strike


def _kill_every_copy_of_a_shard(service: ClusterService, chance: random.Random) -> None:
    for _, process in service.processes("Shard"):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


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


def _abort_an_upgrade(service: ClusterService, chance: random.Random) -> None:
    """The next version becomes ready and is withdrawn before a client reaches it."""
    with service.next_version():
        time.sleep(chance.uniform(0.0, SHORT_S))


def _revert_an_upgrade(service: ClusterService, chance: random.Random) -> None:
    """The next version takes the ledger over with its first stream, and is withdrawn."""
    with service.next_version() as url:
        clients = Clients(url)
        clients.answers_again(LONG_S)
        service.elsewhere += clients.transcripts


FAULTS = (
    Fault("shard", _kills("Shard")),
    Fault("every shard", _kill_every_copy_of_a_shard),
    Fault("shard that hangs", _hang_a_shard),
    Fault("coordinator", _kills("Coordinator")),
    Fault("budget actor", _kills("Budget")),
    Fault("fleet", _kills("Fleet")),
    Fault("Serve replica", _kills("ServeReplica"), "gateway"),
    Fault("Serve controller", _kills("ServeController")),
    Fault("proxy", _kills("ProxyActor"), "gateway"),
    Fault("worker node", _kill_a_worker, "worker"),
    Fault("head", _kill_the_head, "gateway"),
    Fault("network, short", _drops_the_network(SHORT_S), "worker"),
    Fault("network, long", _drops_the_network(LONG_S), "worker"),
    Fault("network of the budget actor", _part_the_budget_from_the_rest, "worker"),
    Fault("database", _fail_the_database),
    Fault("upgrade, aborted", _abort_an_upgrade),
    Fault("upgrade, reverted", _revert_an_upgrade),
)


@dataclass(frozen=True)
class Schedule:
    """A sequence of faults, each with its delay in seconds."""

    seed: int
    faults: tuple[tuple[float, Fault], ...]

    @classmethod
    def drawn(cls, seed: int) -> "Schedule":
        chance = random.Random(seed)
        faults = chance.sample(FAULTS, chance.randint(1, 3))
        return cls(seed, tuple((chance.uniform(0.0, 3.0), fault) for fault in faults))

    def __str__(self) -> str:
        return ", ".join(f"{fault} after {delay:.1f} s" for delay, fault in self.faults)

    def may_break_streams(self, service: ClusterService) -> bool:
        """See `Fault.may_break_streams`. Call it before the run."""
        on_a_worker = any(not node.is_head for node, _ in service.processes("ServeReplica:privmix:gateway"))
        return any(fault.may_break_streams(on_a_worker) for _, fault in self.faults)

    def run(self, service: ClusterService) -> None:
        chance = random.Random(self.seed)
        for delay, fault in self.faults:
            time.sleep(delay)
            fault.strike(service, chance)
