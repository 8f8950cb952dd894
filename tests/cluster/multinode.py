"""Runs a service on several nodes, with keys, copies of its shards, two coordinators, and its ledger in PostgreSQL."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from privmix.budget.client import STEPS_AHEAD
from privmix.database.service import ServiceDatabase
from privmix.foundation.errors import KeysUnavailable, LedgerError
from privmix.keys.records import Key, Share
from tests.cluster.charges import Charges
from tests.cluster.clients import STREAMS, Transcript
from tests.disks import Disk, mounted
from tests.key_store import RequestStore
from tests.nodes import Node, Nodes, cluster
from tests.postgresql import Server
from tests.running import START_S, configure, is_healthy, own_ensemble

PORT = 8000
WORKERS = 2
PARTS = 2
COORDINATORS = 2
LEASE_TOKENS = 8
PACE_S = 0.25
"""The counting model answers in milliseconds. Streams must last until the faults come."""
MAX_LEASE = max(LEASE_TOKENS, STEPS_AHEAD * (STREAMS + 2))
"""A lease covers steps of all streams and probes (`privmix.budget.client.BudgetClient`)."""

KEYS = ("ada", "bob", "carl")
SHARE = Share(tokens=1_000_000, live_streams=64)

REST_S = 4.0
"""The charges are at rest if they do not change for this long."""
RESTS_WITHIN_S = 120.0

SMALL: dict[str, dict[str, Any]] = {"shards": {"copies": 1}, "coordinator": {"replicas": 1}}
"""Changes to the configuration for a deployment on a single node."""

SECTIONS: dict[str, dict[str, Any]] = {
    "privacy": {"tokens": 1_000_000},
    "shards": {"parts_per_shard": PARTS, "copies": 2, "num_cpus": 0.5, "threads": 1},
    "coordinator": {"replicas": COORDINATORS, "step_timeout_s": 20.0, "patience_s": 2.0, "pace_s": PACE_S},
    "engine": {"kind": "transformers", "dtype": "float32", "context_length": 512},
    "http": {"host": "0.0.0.0", "port": PORT, "max_tokens": 256},
}


class ClusterService:
    """A deployed service, and Kubernetes' role for it: `supervise` restarts ended processes.

    Attributes:
        secrets: the secrets of the keys, by name.
        elsewhere: the transcripts of the streams that other deployments of the same ledger served.
        violations: what a fault saw that must not happen.
        anchors: the disk of the ledger's anchor.
    """

    def __init__(self, nodes: Nodes, database: Server, ledger: str, keys: str, config: Path, anchors: Disk) -> None:
        self.nodes = nodes
        self.database = database
        self.anchors = anchors
        self.ledger = ledger
        self.config = config
        self.base_url = f"http://{nodes.head.address}:{PORT}"
        self.elsewhere: list[Transcript] = []
        self.violations: list[str] = []
        self._store = RequestStore(ServiceDatabase(keys))
        created = {name: self._store.create(name, share=SHARE) for name in KEYS}
        self._keys: Mapping[str, Key] = {name: key for name, (key, _) in created.items()}
        self.secrets: Mapping[str, str] = {name: secret.text for name, (_, secret) in created.items()}
        self._supervising = threading.Lock()
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
        with self._supervising:
            self.nodes.supervise()
            if self._serving.poll() is not None:
                self._serving = self._serve()

    def processes(self, title: str) -> list[tuple[Node, psutil.Process]]:
        return [(node, process) for node in self.nodes for process in node.titled(title)]

    def charges_at_rest(self) -> Charges:
        """Returns the charges once the service is idle and has returned what it does not use."""
        deadline = time.monotonic() + RESTS_WITHIN_S
        before: Charges | None = None
        while time.monotonic() < deadline:
            now: Charges | None = None
            with suppress(LedgerError, KeysUnavailable):
                now = Charges.of(self.ledger, self._store, self._keys)
            if now is not None and now == before:
                return now
            before = now
            time.sleep(REST_S)
        raise TimeoutError(f"the charges still change {RESTS_WITHIN_S:g} s after the last stream")

    def held_by_requests(self) -> int:
        """Returns the tokens that running requests hold in the shares of their keys."""
        return sum(account.usage.held for account in self._store.accounts())

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the service with a signal, like an operator, and starts it again after the block."""
        with self._supervising:
            self._serving.terminate()
            try:
                self._serving.wait(START_S)
                yield
            finally:
                self._serving.kill()
                self._serving = self._serve()

    @contextmanager
    def another(self, ledger: str | None = None) -> Iterator[str | None]:
        """Runs another deployment of the ensemble on the spare node, with its ledger or with a copy at `ledger`.

        Yields its URL once it is ready, before it charges a token; None if it does not become ready. SIGTERM ends it
        with the context, as in Kubernetes.
        """
        settings = yaml.safe_load(self.config.read_text())
        settings.update({name: settings[name] | changes for name, changes in SMALL.items()})
        settings["budget"]["ledger"] = ledger or self.ledger
        config, node = self.config.with_name("another.yaml"), self.nodes.spare
        config.write_text(yaml.safe_dump(settings))
        url = f"http://{node.address}:{PORT}"
        process = node.run([sys.executable, "-m", "privmix", "serve", "--config", str(config)])
        try:
            deadline = time.monotonic() + START_S
            while not (ready := is_healthy(url)) and process.poll() is None and time.monotonic() < deadline:
                self.supervise()
                time.sleep(0.5)
            yield url if ready else None
            process.terminate()
            process.wait(START_S)
        finally:
            node.kill()

    def command(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a command of `privmix` on the head."""
        command = ["ip", "netns", "exec", self.nodes.head.name, sys.executable, "-m", "privmix", *arguments]
        environment = self.nodes.head.environment
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=check, timeout=START_S)

    def serve_command(self) -> list[str]:
        """Returns the arguments of `privmix` that start this service."""
        return ["serve", "--config", str(self.config), "--address", self.nodes.address]

    def _serve(self) -> subprocess.Popen[bytes]:
        return self.nodes.head.run([sys.executable, "-m", "privmix", *self.serve_command()])


@contextmanager
def serving(folder: Path, ensemble: Path, database: Server, **sections: dict[str, Any]) -> Iterator[ClusterService]:
    """Runs a cluster with a healthy service until the end of the context.

    The ledger and the keys have databases of their own, so that the ledger alone can be rolled back. Its anchor has a
    disk of its own.
    """
    ledger, keys, anchor = database.database(), database.database(), folder / "anchor"
    anchor.mkdir()
    chosen = {
        **SECTIONS,
        "budget": {"ledger": ledger, "lease_tokens": LEASE_TOKENS, "anchor": str(anchor)},
        "keys": {"database": keys},
        **sections,
    }
    config = configure(folder, own_ensemble(ensemble, folder), **chosen)
    with mounted(anchor, 1) as anchors, cluster(folder, WORKERS, num_cpus=2) as nodes:
        service = ClusterService(nodes, database, ledger, keys, config, anchors)
        service.wait_until_healthy()
        yield service
