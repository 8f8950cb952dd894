"""Every way in which a part of the cluster can fail, each done to real processes and a real network."""

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
"""Longer than it takes Ray to give up a node (`tests.nodes.ENVIRONMENT`)."""

Strike = Callable[[ClusterService, random.Random], None]


@dataclass(frozen=True)
class Fault:
    """`strike` does it, and returns when what it does to the world is over.

    Attributes:
        carrier: what it takes away that may carry streams to their clients: "gateway" stands for the gateways, their
            proxies and the head, "worker" for a worker node, on which a gateway may run.
    """

    name: str
    strike: Strike
    carrier: Literal["gateway", "worker"] | None = None

    def may_break_streams(self, gateway_on_a_worker: bool) -> bool:
        """Whether clients may lose their answers: only the loss of what carries them may do that."""
        return self.carrier == "gateway" or (self.carrier == "worker" and gateway_on_a_worker)

    def __str__(self) -> str:
        return self.name


def _kills(title: str) -> Strike:
    def strike(service: ClusterService, chance: random.Random) -> None:
        if found := service.processes(title):  # an earlier fault may have taken it
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
    """Its node is given up and another budget actor starts, while the old one still reaches the database."""
    for node, _ in service.processes("Budget"):
        node.cut()
        time.sleep(LONG_S)
        node.mend()


def _fail_the_database(service: ClusterService, chance: random.Random) -> None:
    """Under load a commit is under way most of the time."""
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
    """Faults, each after so many seconds."""

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
        """See `Fault`; to be asked before the run."""
        on_a_worker = any(not node.is_head for node, _ in service.processes("ServeReplica:privmix:gateway"))
        return any(fault.may_break_streams(on_a_worker) for _, fault in self.faults)

    def run(self, service: ClusterService) -> None:
        chance = random.Random(self.seed)
        for delay, fault in self.faults:
            time.sleep(delay)
            fault.strike(service, chance)
