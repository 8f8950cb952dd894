"""Runs a Ray cluster of several nodes on one machine, each in a network namespace with its own address.

Needs root and iproute2. One bridge connects the nodes. A node can be disconnected, and killed with all its processes.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from privmix.gateway import front_door

PORT = 6379
START_S = 90.0
# With Ray's defaults, the detection of a lost node takes half a minute.
ENVIRONMENT = {
    **front_door.ENVIRONMENT,
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
}


def unavailable() -> str | None:
    """Returns the reason why this machine cannot run such a cluster, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    probe = f"privmix-probe-{os.getpid()}"  # of this process alone, because another one may ask at the same time
    if _ip("netns", "add", probe, check=False):
        return "network namespaces are not allowed here"
    _ip("netns", "delete", probe)
    return None


class Node:
    """One machine of the cluster; the first is the head."""

    def __init__(self, network: int, number: int, log: Path, num_cpus: float) -> None:
        self.name = f"pmx{network}n{number}"
        self.address = f"10.213.{network}.{10 + number}"
        self._head_address = f"10.213.{network}.10:{PORT}"
        self.is_head = number == 0
        self._log = log
        self._num_cpus = num_cpus
        self._ray: subprocess.Popen[bytes] | None = None

    def join(self, bridge: str) -> None:
        """Creates the namespace and connects it to the bridge."""
        _ip("netns", "add", self.name)
        _ip("link", "add", self._plug, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("link", "set", self._plug, "master", bridge, "up")
        _ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", self.name, "link", "set", device, "up")

    def start(self) -> None:
        """Starts Ray like the container of a pod, without waiting; see `wait`."""
        role = (
            ["--head", f"--port={PORT}", "--include-dashboard=false"]
            if self.is_head
            else [f"--address={self._head_address}"]
        )
        command = ["start", *role, f"--node-ip-address={self.address}", f"--num-cpus={self._num_cpus:g}"]
        ray = Path(sys.executable).with_name("ray")
        self._ray = self.run([str(ray), *command, "--object-store-memory=150000000", "--block"])

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **ENVIRONMENT}

    def run(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Starts a process on this node."""
        with self._log.open("ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        processes_here = []
        for number in listed.stdout.split():
            with suppress(psutil.NoSuchProcess):
                processes_here.append(psutil.Process(int(number)))
        return processes_here

    def titled(self, name: str) -> list[psutil.Process]:
        """Returns the processes of actors on this node, by the title that Ray gives them: class and method."""
        processes_here = []
        for process in self.processes():
            with suppress(psutil.Error):
                if (title := " ".join(process.cmdline())).startswith("ray::") and name in title:
                    processes_here.append(process)
        return processes_here

    @property
    def ended(self) -> bool:
        """Tells whether Ray has ended on this node. A node that is disconnected for long ends by itself."""
        return self._ray is None or self._ray.poll() is not None

    def kill(self) -> None:
        """Kills all processes of the node, like a power failure."""
        while processes := self.processes():
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            time.sleep(0.05)
        if self._ray is not None:
            self._ray.wait()

    def cut(self) -> None:
        """Disconnects the node from the network."""
        _ip("link", "set", self._plug, "down")

    def mend(self) -> None:
        _ip("link", "set", self._plug, "up")

    def leave(self) -> None:
        self.kill()
        _ip("link", "delete", self._plug)  # the kernel would delete it some time after the namespace
        _ip("netns", "delete", self.name)

    def wait(self) -> None:
        """Waits until Ray accepts work on this node."""
        deadline = time.monotonic() + START_S
        while not any(process.name() == "raylet" for process in self.processes()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no Ray on {self.name}: {self._log.read_text()[-2000:]}")
            if self.ended:  # on a busy machine Ray gives up after some 30 s; the container of a pod starts again
                self.start()
            time.sleep(0.1)

    @property
    def _plug(self) -> str:
        return f"{self.name}p"


class Nodes:
    """The nodes of a cluster; the head first.

    Attributes:
        spare: a node on the same network that does not belong to the cluster.
    """

    def __init__(self, nodes: tuple[Node, ...], spare: Node) -> None:
        self.head, *workers = nodes
        self.workers = tuple(workers)
        self.spare = spare

    def __iter__(self) -> Iterator[Node]:
        return iter((self.head, *self.workers))

    @property
    def address(self) -> str:
        """The address of Ray for drivers."""
        return f"{self.head.address}:{PORT}"

    def supervise(self) -> None:
        """Restarts nodes whose Ray has ended, like Kubernetes. A new head gets new workers."""
        if self.head.ended:
            for node in self:
                node.kill()
        ended = [node for node in self if node.ended]
        for node in ended:
            node.kill()  # ends remaining processes of its Ray
        start(ended)


@contextmanager
def cluster(folder: Path, workers: int, num_cpus: float) -> Iterator[Nodes]:
    """Runs a head without shards, and workers, until the end of the context."""
    network = _free_network()
    bridge = f"pmx{network}"
    with ExitStack() as undo:
        _ip("link", "add", bridge, "type", "bridge")
        undo.callback(_ip, "link", "delete", bridge)
        _ip("address", "add", f"10.213.{network}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        nodes = []
        for number in range(workers + 2):
            node = Node(network, number, folder / f"node-{number}.log", num_cpus if number else 0)
            node.join(bridge)
            undo.callback(node.leave)
            nodes.append(node)
        *clustered, spare = nodes
        start(clustered)
        yield Nodes(tuple(clustered), spare)


def start(nodes: Sequence[Node]) -> None:
    """Starts the head first, because the others connect to it."""
    for node in sorted(nodes, key=lambda node: not node.is_head):
        node.start()
        if node.is_head:
            node.wait()
    for node in nodes:
        node.wait()


def _free_network() -> int:
    """Returns a network number that no cluster on this machine uses."""
    taken = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    return next(number for number in range(1, 255) if f"pmx{number} " not in taken)


def _ip(*arguments: str, check: bool = True) -> int:
    return subprocess.run(["ip", *arguments], check=check, capture_output=not check).returncode
