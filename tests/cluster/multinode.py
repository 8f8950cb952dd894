"""Runs a service on several nodes, with copies of its shards, two coordinators, and its ledger in PostgreSQL."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.cluster.clients import Transcript
from tests.nodes import Node, Nodes, cluster
from tests.postgresql import Server
from tests.running import START_S, configure, is_healthy, own_ensemble

PORT = 8000
WORKERS = 2
PARTS = 2

SMALL: dict[str, dict[str, Any]] = {"shards": {"copies": 1}, "coordinator": {"replicas": 1}}
"""Changes to the configuration for a deployment on a single node."""

SECTIONS: dict[str, dict[str, Any]] = {
    "shards": {"parts_per_shard": PARTS, "copies": 2, "num_cpus": 0.5, "threads": 1},
    "coordinator": {"replicas": 2, "step_timeout_s": 20.0, "patience_s": 2.0},
    "engine": {"kind": "transformers", "dtype": "float32", "context_length": 512},
    "http": {"host": "0.0.0.0", "port": PORT, "anonymous": True, "max_tokens": 256},
}


class ClusterService:
    """A deployed service, and Kubernetes' role for it: `supervise` restarts ended processes.

    Attributes:
        elsewhere: the transcripts of the streams that other deployments of the same ledger served.
    """

    def __init__(self, nodes: Nodes, database: Server, ledger: str, config: Path) -> None:
        self.nodes = nodes
        self.database = database
        self.ledger = ledger
        self.config = config
        self.base_url = f"http://{nodes.head.address}:{PORT}"
        self.elsewhere: list[Transcript] = []
        self._serving = self._serve()

    def healthy(self) -> bool:
        return is_healthy(self.base_url)

    def wait_until_healthy(self, seconds: float = START_S) -> None:
        deadline = time.monotonic() + seconds
        while not self.healthy():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the service did not answer within {seconds:g} s")
            self.supervise()
            time.sleep(0.5)

    def supervise(self) -> None:
        """Restarts ended processes."""
        self.nodes.supervise()
        if self._serving.poll() is not None:
            self._serving = self._serve()

    def processes(self, title: str) -> list[tuple[Node, psutil.Process]]:
        return [(node, process) for node in self.nodes for process in node.titled(title)]

    @contextmanager
    def next_version(self) -> Iterator[str]:
        """Runs another deployment of the ensemble and its ledger on the spare node, and yields its URL.

        The deployment is ready and has not charged a token. SIGTERM ends it with the context, like in Kubernetes.
        """
        settings = yaml.safe_load(self.config.read_text())
        settings.update({name: settings[name] | changes for name, changes in SMALL.items()})
        config = self.config.with_name("next-version.yaml")
        config.write_text(yaml.safe_dump(settings))
        node = self.nodes.spare
        url = f"http://{node.address}:{PORT}"
        process = node.run([sys.executable, "-m", "cluster", "serve", "--config", str(config)])
        try:
            deadline = time.monotonic() + START_S
            while not is_healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise TimeoutError("the next version did not start")
                self.supervise()
                time.sleep(0.5)
            yield url
            process.terminate()
            process.wait(START_S)
        finally:
            node.kill()

    def command(self, *arguments: str) -> str:
        """Runs a command of `privmix` on the head and returns its output."""
        command = ["ip", "netns", "exec", self.nodes.head.name, sys.executable, "-m", "cluster", *arguments]
        environment = self.nodes.head.environment
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def _serve(self) -> subprocess.Popen[bytes]:
        serve = ["serve", "--config", str(self.config), "--address", self.nodes.address]
        return self.nodes.head.run([sys.executable, "-m", "cluster", *serve])


@contextmanager
def serving(folder: Path, ensemble: Path, database: Server, **sections: dict[str, Any]) -> Iterator[ClusterService]:
    """Runs a cluster with a healthy service until the end of the context."""
    ledger = database.database()
    chosen = {**SECTIONS, "budget": {"ledger": ledger, "lease_tokens": 8}, **sections}
    config = configure(folder, own_ensemble(ensemble, folder), **chosen)
    with cluster(folder, WORKERS, num_cpus=2) as nodes:
        service = ClusterService(nodes, database, ledger, config)
        service.wait_until_healthy()
        yield service
